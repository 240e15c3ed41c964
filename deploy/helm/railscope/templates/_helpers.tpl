{{- define "railscope.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 63 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "railscope.selector" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "railscope.labels" -}}
{{ include "railscope.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "railscope.serviceAccount" -}}
{{- .Values.serviceAccount.name | default (ternary (include "railscope.fullname" .) "default" .Values.serviceAccount.create) -}}
{{- end -}}

{{- define "railscope.image" -}}
{{- if .Values.image.digest -}}
{{- printf "%s@%s" .Values.image.repository .Values.image.digest -}}
{{- else -}}
{{- printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) -}}
{{- end -}}
{{- end -}}

{{/* railscope.yml: the user's keys, and those that the chart decides. */}}
{{- define "railscope.config" -}}
{{- $web := dict "listen_address" (printf ":%d" (int .Values.port)) -}}
{{- if .Values.webConfigSecret -}}
{{- $_ := set $web "config_file" "/etc/railscope-web/web-config.yml" -}}
{{- end -}}
{{- toYaml (mergeOverwrite (deepCopy .Values.config) (dict "web" $web)) -}}
{{- end -}}

{{/* A web page that takes a client's certificate or a password cannot be asked by the kubelet. */}}
{{- define "railscope.probe" -}}
{{- if .values.webConfigSecret -}}
tcpSocket: {port: metrics}
{{- else -}}
httpGet: {path: {{ .path }}, port: metrics}
{{- end -}}
{{- end -}}

{{/* What both containers of the pods that set the node's condition have. */}}
{{- define "railscope.condition" -}}
image: {{ include "railscope.image" . | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
env:
  - name: NODE_NAME
    valueFrom: {fieldRef: {fieldPath: spec.nodeName}}
  - {name: RAILSCOPE_LEAST_CONFIDENCE, value: {{ .Values.nodeCondition.confidence }}}
resources: {{- toYaml .Values.nodeCondition.resources | nindent 2 }}
securityContext:
  # The socket is the agent's user's alone, which is root; of root's rights it has none.
  runAsUser: 0
  privileged: false
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  seccompProfile: {type: RuntimeDefault}
  {{- with .Values.seLinuxOptions }}
  seLinuxOptions: {{- toYaml . | nindent 4 }}
  {{- end }}
  capabilities: {drop: [ALL]}
volumeMounts:
  - {name: state, mountPath: /run/railscope, readOnly: true}
  - {name: action, mountPath: /actions, readOnly: true}
{{- end -}}

{{/* In a checkout the chart's files are links to the project's, which some tools leave behind. */}}
{{- define "railscope.without" -}}
{{- fail (printf "%s: the chart has no such file, as a tool left links behind that lead out of its folder: take a release's railscope-chart, or what `helm package` makes" .) -}}
{{- end -}}
