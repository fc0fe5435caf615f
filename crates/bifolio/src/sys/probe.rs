//! Start-up probes: which optional kernel features work here, and the fallback of each.
//!
//! A cache probes once, when it is built, by trying the call itself on a scratch page: a version
//! number does not tell what a container's filter or a distribution's patches allow. In the layers
//! above, `memory` uses huge pages and early page faults, `io` direct transfers and rings, and file
//! maps faults served in user space. Each feature has a named fallback, and each can be masked, so
//! that its fallback can be tested on any machine.
//!
//! A feature is *available* if its probe succeeded, and *in use* if it is also not disabled. A
//! feature that depends on the file (direct I/O) is reported as available, "decided per file".
//!
//! Nothing here is remembered in globals, and nothing fails: a feature whose probe cannot run is
//! not available, with the reason. The trials are in `probe_features.rs`.

use std::fmt;
use std::io;
use std::sync::{Arc, OnceLock};

/// An optional feature of the kernel, each with a fallback.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Feature {
    /// 2 MiB pages under the frames (`madvise(MADV_HUGEPAGE)`).
    TransparentHugePages,
    /// Faulting memory in with one call that reports errors (`MADV_POPULATE_WRITE`, Linux 5.14).
    PopulateWrite,
    /// Memory that reads as zeros in a forked child (`MADV_WIPEONFORK`, Linux 4.14).
    WipeOnFork,
    /// The required alignment of direct I/O, reported by the kernel (`STATX_DIOALIGN`, Linux 6.1).
    StatxDirectAlignment,
    /// Transfers between frames and the device that skip the kernel's page cache (`O_DIRECT`).
    DirectIo,
    /// Many transfers with one system call (`io_uring`, Linux 5.6).
    IoUring,
    /// Page faults of mapped files, served in user space (`userfaultfd`, Linux 5.18).
    UserFaults,
    /// Page faults inside system calls that access memory of a map, also served; needs a privilege.
    KernelFaults,
    /// Tracking of stores without a fault for each (`UFFD_FEATURE_WP_ASYNC`, `PAGEMAP_SCAN`, Linux
    /// 6.7), and pipes that keep pages (`vmsplice`).
    WriteProtectAsync,
    /// Pages that cannot be read and raise SIGBUS when touched (`UFFDIO_POISON`, Linux 6.6).
    FaultPoison,
    /// Freeing scattered pages with one call (`process_madvise` on the own process, Linux 6.14;
    /// with one TLB flush since 6.16).
    VectoredUnmap,
    /// Pipes that keep many pages of maps during eviction (`F_SETPIPE_SZ`, up to
    /// `fs.pipe-user-pages-soft` for all pipes of a user).
    LargePipes,
}

impl Feature {
    /// Every feature, in the order of reports.
    pub const ALL: [Self; 12] = [
        Self::TransparentHugePages,
        Self::PopulateWrite,
        Self::WipeOnFork,
        Self::StatxDirectAlignment,
        Self::DirectIo,
        Self::IoUring,
        Self::UserFaults,
        Self::KernelFaults,
        Self::WriteProtectAsync,
        Self::FaultPoison,
        Self::VectoredUnmap,
        Self::LargePipes,
    ];

    /// Returns the name used in reports, statistics and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::TransparentHugePages => "transparent-huge-pages",
            Self::PopulateWrite => "populate-write",
            Self::WipeOnFork => "wipe-on-fork",
            Self::StatxDirectAlignment => "statx-direct-alignment",
            Self::DirectIo => "direct-io",
            Self::IoUring => "io-uring",
            Self::UserFaults => "user-faults",
            Self::KernelFaults => "kernel-faults",
            Self::WriteProtectAsync => "write-protect-async",
            Self::FaultPoison => "fault-poison",
            Self::VectoredUnmap => "vectored-unmap",
            Self::LargePipes => "large-pipes",
        }
    }

    /// Returns what is used instead where the feature is not in use.
    pub fn fallback(self) -> &'static str {
        match self {
            Self::TransparentHugePages => "4 KiB pages",
            Self::PopulateWrite => "pages are faulted in on first touch",
            Self::WipeOnFork => {
                "a forked child keeps its own copy and is detected by its process id"
            }
            Self::StatxDirectAlignment => "4096-byte alignment, tried by one read at open",
            Self::DirectIo => "buffered transfers through the kernel's page cache",
            Self::IoUring => "a pool of threads, each with preadv or pwritev",
            Self::UserFaults => "files cannot be mapped",
            Self::KernelFaults => {
                "a system call on a page of a map that is not resident fails with EFAULT"
            }
            Self::WriteProtectAsync => "files can be mapped for reading only",
            Self::FaultPoison => "a page that cannot be read is made inaccessible (SIGSEGV)",
            Self::VectoredUnmap => "one madvise and one TLB flush per page",
            Self::LargePipes => "pages of maps are evicted a few at a time",
        }
    }

    fn bit(self) -> u16 {
        1 << self as u16
    }
}

impl fmt::Display for Feature {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

/// Result of the probe of one feature.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FeatureReport {
    #[doc(hidden)]
    pub feature: Feature,
    /// Name of the feature, such as `io-uring`.
    pub name: &'static str,
    /// `true` if the probe succeeded on this machine.
    pub available: bool,
    /// `true` if the feature is used: available, and not disabled by the caller.
    pub in_use: bool,
    /// Fallback that is used instead.
    pub fallback: &'static str,
    /// Why the feature is available or not, or that it was disabled.
    pub reason: String,
}

/// The features that a cache may use: probed with success and not disabled.
#[derive(Clone, Debug)]
pub struct Features {
    in_use: u16,
    reports: Vec<FeatureReport>,
    /// Reasons of features that the kernel has refused since the start; shared by all clones.
    withdrawn: Arc<[OnceLock<String>; Feature::ALL.len()]>,
}

impl Features {
    pub(super) fn of_reports(reports: Vec<FeatureReport>) -> Self {
        let used = reports.iter().filter(|report| report.in_use);
        let in_use = used.fold(0, |bits, report| bits | report.feature.bit());
        Self { in_use, reports, withdrawn: Arc::default() }
    }

    /// Stops all clones from using a feature that the kernel refuses although its probe succeeded.
    pub(crate) fn withdraw(&self, feature: Feature, call: &str, error: &io::Error) {
        let reason = format!("refused since the start: {}", refused(call, error));
        if self.withdrawn[feature as usize].set(reason).is_ok() {
            log::warn!("{feature} is no longer used, but {}: {call}: {error}", feature.fallback());
        }
    }

    /// Returns `true` if `feature` may be used.
    pub fn has(&self, feature: Feature) -> bool {
        self.in_use & feature.bit() != 0 && self.withdrawn[feature as usize].get().is_none()
    }

    pub(crate) fn why_not(&self, feature: Feature) -> Option<String> {
        let report = self.reports().into_iter().find(|report| report.feature == feature);
        report.filter(|report| !report.in_use).map(|report| report.reason)
    }

    /// Returns the result of each probe.
    pub fn reports(&self) -> Vec<FeatureReport> {
        let mut reports = self.reports.clone();
        for report in &mut reports {
            if let Some(reason) = self.withdrawn[report.feature as usize].get() {
                let reason = reason.clone();
                (report.available, report.in_use, report.reason) = (false, false, reason);
            }
        }
        reports
    }
}

/// Describes the failure of `call`, and what may have forbidden it.
pub(crate) fn refused(call: &str, error: &io::Error) -> String {
    match error.raw_os_error() {
        Some(libc::EPERM) => format!("{call}: {error}; a filter (seccomp) may forbid it"),
        Some(libc::ENOSYS) => format!("{call}: {error}; no kernel support, or a filter"),
        _ => format!("{call}: {error}"),
    }
}
