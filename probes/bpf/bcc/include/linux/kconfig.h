/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Stand-ins for the kernel's headers, for the second loader (probes/loading/bcc_loader.py).  bcc wants the headers of the
 * running kernel and, where it finds none, unpacks /sys/kernel/kheaders.tar.xz into /tmp.  The NCCL probes need
 * nothing of a kernel's insides: what bcc's own bpf.h and helpers.h take from it is in this folder, so that a host
 * needs no kernel headers and every host compiles the same text.  A header that only has to be there is empty.
 */
#define CONFIG_BPF_SYSCALL 1
