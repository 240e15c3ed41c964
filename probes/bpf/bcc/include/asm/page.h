/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* BPF_RINGBUF_OUTPUT takes pages and makes bytes of them: probes/loading/bcc_source.py divides by the same number. */
#define PAGE_SIZE 4096
