/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The oldest kernel that the probes load on; newer ones take its programs too. */
#define KERNEL_VERSION(major, minor, patch) (((major) << 16) + ((minor) << 8) + (patch))
#define LINUX_VERSION_CODE KERNEL_VERSION(5, 15, 0)
