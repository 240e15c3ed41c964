// railscope's dashboards and rules as a mixin, made by `railscope dashboards build`: its options --selector,
// --cluster-label, --runbooks and --threshold are what a mixin's _config would be.  Jsonnet 0.18 or newer.
{
  grafanaDashboards+:: {
    'railscope-fleet.json': import 'json/railscope-fleet.json',
    'railscope-job.json': import 'json/railscope-job.json',
    'railscope-node.json': import 'json/railscope-node.json',
    'railscope-stall.json': import 'json/railscope-stall.json',
    'railscope-agent.json': import 'json/railscope-agent.json',
  },
  prometheusRules+:: std.parseYaml(importstr 'rules/railscope-recording.yml'),
  prometheusAlerts+:: std.parseYaml(importstr 'rules/railscope-alerts.yml'),
}
