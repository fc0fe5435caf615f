//! Start-up probes: which optional kernel features work here, and the fallback of each.
//!
//! A cache probes once, when it is built, by trying the call itself on a scratch page: a version
//! number does not tell what a container's filter or a distribution's patches allow. Each feature
//! can be masked, so that its fallback can be tested on any machine.
//!
//! Nothing here fails: a feature whose probe cannot run is not available, with the reason. The
//! trials for maps are passed by the floor above that has them (`cache/builder.rs`). For io_uring a
//! ring is created, and a byte read through it: containers refuse rings in several ways (a filter
//! refuses one of the three calls, `kernel.io_uring_disabled` affects the first).
//!
//! # Safety
//! Lends a byte to a ring, and waits for it.
#![allow(unsafe_code)]

use super::file::{above_standard, read_text};
use super::memory::{HUGE_PAGE_BYTES, PAGE_BYTES, Reservation};
use super::pressure::{OF_MACHINE, PressureSource};
use super::ring::{Ring, RingCall, RingMemory};
use super::{INTERRUPTIONS_MAX, is_forbidden};
use rustix::mm::Advice;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::atomic::AtomicU8;
use std::sync::{Arc, OnceLock};
use std::{fmt, io};

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
    /// The time that tasks have waited for memory (PSI, Linux 4.20), of the control group or the
    /// machine.
    MemoryPressure,
    /// Watches and leases that tell whether a closed file was changed (`inotify`, `F_SETLEASE`).
    FileWatches,
}

impl Feature {
    /// Every feature, in the order of reports.
    pub const ALL: [Self; 14] = [
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
        Self::MemoryPressure,
        Self::FileWatches,
    ];

    /// Returns the name used in reports, statistics and on the command line.
    pub(crate) fn name(self) -> &'static str {
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
            Self::MemoryPressure => "memory-pressure",
            Self::FileWatches => "file-watches",
        }
    }

    /// Returns what is used instead where the feature is not in use.
    pub(crate) fn fallback(self) -> &'static str {
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
            Self::MemoryPressure => "the bound stays as it was set while memory is short",
            Self::FileWatches => "pages of closed files are not kept",
        }
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
pub(crate) struct Features {
    /// In the order of [`Feature::ALL`].
    reports: Vec<FeatureReport>,
    /// Reasons of features that the kernel has refused since the start; shared by all clones.
    withdrawn: Arc<[OnceLock<String>; Feature::ALL.len()]>,
}

impl Features {
    /// Probes every feature, those of maps with `try_for_maps`; those in `disabled` are reported
    /// but not used.
    pub(crate) fn probe_with(disabled: &[Feature], try_for_maps: Trial) -> Self {
        let finding = |feature| probe(feature, try_for_maps);
        let report = |feature| report(feature, finding(feature), disabled.contains(&feature));
        let reports = Feature::ALL.map(report).to_vec();
        Self { reports, withdrawn: Arc::default() }
    }

    /// The features of this system, none disabled and without those of maps; the first call probes
    /// them.
    pub(crate) fn of_system() -> &'static Self {
        static OF_SYSTEM: OnceLock<Features> = OnceLock::new();
        OF_SYSTEM.get_or_init(|| Self::probe_with(&[], |_| Err("not probed".to_owned())))
    }

    /// Stops all clones from using a feature that the kernel refuses although its probe succeeded.
    pub(crate) fn withdraw(&self, feature: Feature, call: &str, error: &io::Error) {
        let reason = format!("refused since the start: {}", refused(call, error));
        if self.withdrawn[feature as usize].set(reason).is_ok() {
            log::warn!("{feature} is no longer used, but {}: {call}: {error}", feature.fallback());
        }
    }

    /// Makes a part of `memory` resident, which no other thread uses yet; in huge pages if `huge`.
    pub(crate) fn populate(
        &self,
        memory: &Reservation,
        (offset_bytes, length_bytes): (usize, usize),
        huge: bool,
    ) -> io::Result<()> {
        if huge {
            memory.prefer_huge_pages_in(offset_bytes, length_bytes);
            if memory.collapse(offset_bytes, length_bytes) {
                return Ok(());
            }
        }
        if self.has(Feature::PopulateWrite) {
            match memory.populate(offset_bytes, length_bytes) {
                Err(error) if is_forbidden(&error) => {
                    self.withdraw(Feature::PopulateWrite, "madvise", &error);
                }
                answer => return answer,
            }
        }
        memory.touch(offset_bytes, length_bytes);
        Ok(())
    }

    /// Returns `true` if `feature` may be used.
    pub(crate) fn has(&self, feature: Feature) -> bool {
        let number = feature as usize;
        self.reports[number].in_use && self.withdrawn[number].get().is_none()
    }

    pub(crate) fn why_not(&self, feature: Feature) -> Option<String> {
        let report = self.reports().swap_remove(feature as usize);
        (!report.in_use).then_some(report.reason)
    }

    /// Returns the result of each probe.
    pub(crate) fn reports(&self) -> Vec<FeatureReport> {
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

pub(crate) fn refused(call: &str, error: &io::Error) -> String {
    match error.raw_os_error() {
        Some(libc::EPERM) => format!("{call}: {error}; a filter (seccomp) may forbid it"),
        Some(libc::ENOSYS) => format!("{call}: {error}; no kernel support, or a filter"),
        _ => format!("{call}: {error}"),
    }
}

const HUGE_PAGE_SETTINGS: &str = "/sys/kernel/mm/transparent_hugepage";

/// Why a feature is available or, as the error, why it is not.
pub(crate) type Finding = Result<String, String>;

/// Tries a feature that only maps need.
pub(crate) type Trial = fn(Feature) -> Finding;

fn probe(feature: Feature, try_for_maps: Trial) -> Finding {
    match feature {
        Feature::TransparentHugePages => probe_huge_pages(),
        Feature::PopulateWrite => probe_advice("MADV_POPULATE_WRITE", Advice::LinuxPopulateWrite),
        Feature::WipeOnFork => probe_advice("MADV_WIPEONFORK", Advice::LinuxWipeOnFork),
        Feature::StatxDirectAlignment | Feature::DirectIo => Ok("decided per file".to_owned()),
        Feature::IoUring => io_uring(),
        Feature::MemoryPressure => memory_pressure(),
        Feature::UserFaults
        | Feature::KernelFaults
        | Feature::WriteProtectAsync
        | Feature::FaultPoison
        | Feature::VectoredUnmap
        | Feature::LargePipes => try_for_maps(feature),
        Feature::FileWatches => {
            let works = "a lease and a watch saw a writer";
            finding(super::watch::trial(), works, "inotify and F_SETLEASE")
        }
    }
}

fn report(feature: Feature, finding: Finding, disabled: bool) -> FeatureReport {
    let available = finding.is_ok();
    let found = finding.unwrap_or_else(|reason| reason);
    FeatureReport {
        feature,
        name: feature.name(),
        available,
        in_use: available && !disabled,
        fallback: feature.fallback(),
        reason: if disabled { format!("disabled by the caller ({found})") } else { found },
    }
}

fn probe_huge_pages() -> Finding {
    if rustix::thread::transparent_huge_pages_are_disabled().unwrap_or(false) {
        return Err("disabled for this process (PR_SET_THP_DISABLE)".to_owned());
    }
    probe_advice("MADV_HUGEPAGE", Advice::LinuxHugepage)?;
    let setting = |name| read_text(Path::new(HUGE_PAGE_SETTINGS).join(name)).ok();
    huge_page_policy(
        setting("enabled").as_deref(),
        setting("hugepages-2048kB/enabled").as_deref(),
        setting("hpage_pmd_size").as_deref(),
    )
}

/// Evaluates the settings of `/sys/kernel/mm/transparent_hugepage`; `None` is a missing file.
///
/// `two_mib` (since Linux 6.8) overrides `enabled` unless it is `inherit`.
fn huge_page_policy(
    enabled: Option<&str>,
    two_mib: Option<&str>,
    huge_page_bytes: Option<&str>,
) -> Finding {
    if let Some(bytes) = huge_page_bytes.map(str::trim)
        && bytes != HUGE_PAGE_BYTES.to_string()
    {
        return Err(format!("the huge page of this machine has {bytes} bytes, not 2 MiB"));
    }
    let (name, chosen) = match two_mib.and_then(chosen_setting) {
        Some(own) if own != "inherit" => ("hugepages-2048kB/enabled", Some(own)),
        _ => ("enabled", enabled.and_then(chosen_setting)),
    };
    match chosen {
        Some("never") => Err(format!("{HUGE_PAGE_SETTINGS}/{name} says never")),
        Some(policy) => Ok(format!("{HUGE_PAGE_SETTINGS}/{name} says {policy}")),
        None => Ok("madvise(MADV_HUGEPAGE) works; the system's policy cannot be read".to_owned()),
    }
}

/// Returns the word in brackets of a setting such as `always [madvise] never`.
fn chosen_setting(text: &str) -> Option<&str> {
    text.split_whitespace().find_map(|word| word.strip_prefix('[')?.strip_suffix(']'))
}

/// Calls `madvise` on fresh anonymous memory; for huge pages, on memory that holds one.
fn probe_advice(name: &str, advice: Advice) -> Finding {
    let advised_bytes =
        if advice == Advice::LinuxHugepage { 2 * HUGE_PAGE_BYTES } else { PAGE_BYTES };
    let scratch = Reservation::new(advised_bytes, PAGE_BYTES);
    match scratch.and_then(|scratch| scratch.advise(0, advised_bytes, advice)) {
        Ok(()) => Ok(format!("madvise({name}) works")),
        Err(error) => Err(format!("madvise({name}): {error}")),
    }
}

pub(crate) fn finding(trial: io::Result<()>, works: &str, name: &str) -> Finding {
    match trial {
        Ok(()) => Ok(works.to_owned()),
        Err(error) => Err(refused(name, &error)),
    }
}

fn memory_pressure() -> Finding {
    match PressureSource::of_process() {
        Ok(source) => Ok(format!("{} counts waits", source.path().display())),
        Err(error) => Err(refused(OF_MACHINE, &error)),
    }
}

fn io_uring() -> Finding {
    let trial = || {
        let mut ring = Ring::open(1)?;
        if !ring.knows_all_calls()? {
            return Err(io::Error::other("the kernel is older than 5.6"));
        }
        read_one_byte(&mut ring)
    };
    match trial() {
        Ok(()) => Ok("io_uring works".to_owned()),
        Err(error) => {
            let setting = read_text("/proc/sys/kernel/io_uring_disabled");
            Err(refusal("io_uring", &error, setting.ok().as_deref()))
        }
    }
}

/// Returns why `call` is unavailable; `setting` is `kernel.io_uring_disabled`, if readable.
fn refusal(call: &str, error: &io::Error, setting: Option<&str>) -> String {
    match (error.raw_os_error(), setting.map(str::trim)) {
        (Some(libc::EPERM), Some(setting @ ("1" | "2"))) => {
            format!("{call}: kernel.io_uring_disabled is {setting}")
        }
        (Some(libc::ENOMEM), _) => format!("{call}: {error}; RLIMIT_MEMLOCK may be too low"),
        _ => refused(call, error),
    }
}

fn read_one_byte(ring: &mut Ring) -> io::Result<()> {
    let own = above_standard(|| File::open("/proc/self/exe"));
    let file = own.or_else(|_| above_standard(|| File::open("/dev/zero")))?;
    // The kernel may write it after the trial was abandoned.
    static BYTE: AtomicU8 = AtomicU8::new(0);
    let memory = RingMemory::One { start: BYTE.as_ptr(), length_bytes: 1 };
    let call = RingCall { is_write: false, file: file.as_raw_fd(), memory, position_bytes: 0 };
    // SAFETY: the byte lives forever, and nothing else accesses it.
    if !unsafe { ring.push(&call, 0) } {
        return Err(io::ErrorKind::WouldBlock.into());
    }
    for _ in 0..INTERRUPTIONS_MAX {
        let entered = ring.enter(1);
        if let Some((_, answer)) = ring.reap() {
            return answer.map(drop);
        }
        match entered {
            Err(error) if error.kind() != io::ErrorKind::Interrupted => return Err(error),
            _ => {}
        }
    }
    Err(io::ErrorKind::Interrupted.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_names_the_setting_or_suspects_a_filter() {
        let say =
            |errno, setting| refusal("io_uring", &io::Error::from_raw_os_error(errno), setting);
        assert!(say(libc::EPERM, Some("2\n")).contains("kernel.io_uring_disabled is 2"));
        assert!(say(libc::EPERM, Some("0\n")).contains("seccomp"));
        assert!(say(libc::ENOSYS, None).contains("no kernel support"));
        assert!(say(libc::ENOMEM, None).contains("RLIMIT_MEMLOCK"));
    }

    #[test]
    fn masking_one_feature_disables_only_that_feature() {
        let all = Features::probe(&[]);
        for masked in Feature::ALL {
            let features = Features::probe(&[masked]);
            assert!(!features.has(masked), "{masked}");
            for other in Feature::ALL.into_iter().filter(|other| *other != masked) {
                assert_eq!(features.has(other), all.has(other), "{other} while masking {masked}");
            }
            let reports = features.reports();
            let report = reports.iter().find(|report| report.feature == masked).unwrap();
            assert!(!report.in_use);
            assert_eq!(report.available, all.has(masked), "masking must not change the finding");
            assert!(report.reason.starts_with("disabled by the caller"), "{}", report.reason);
        }
    }

    #[test]
    fn every_feature_is_reported_once_with_its_fallback() {
        let reports = Features::probe(&[]).reports();
        let features: Vec<_> = reports.iter().map(|report| report.feature).collect();
        assert_eq!(features, Feature::ALL);
        for (i, report) in reports.iter().enumerate() {
            assert!(!report.fallback.is_empty());
            assert!(!report.reason.is_empty());
            assert_eq!(report.in_use, report.available);
            assert!(reports[..i].iter().all(|other| other.name != report.name));
        }
    }

    #[test]
    fn masking_everything_disables_every_feature() {
        let features = Features::probe(&Feature::ALL);
        assert!(Feature::ALL.into_iter().all(|feature| !features.has(feature)));
    }

    #[test]
    fn features_older_than_the_oldest_supported_kernel_are_found() {
        let features = Features::probe(&[]);
        assert!(features.has(Feature::WipeOnFork), "{:?}", features.reports());
        assert!(features.has(Feature::DirectIo));
    }

    #[test]
    fn a_feature_whose_probe_failed_is_unused_and_has_a_reason() {
        let report = report(Feature::PopulateWrite, Err("EINVAL".to_owned()), false);
        assert!(!report.available);
        assert!(!report.in_use);
        assert_eq!(report.reason, "EINVAL");
    }

    #[test]
    fn an_advice_the_kernel_refuses_is_an_error() {
        // Guaranteed to be refused: anonymous memory has no device to be removed from.
        assert!(probe_advice("MADV_REMOVE", Advice::LinuxRemove).is_err());
    }

    #[test]
    fn huge_page_settings_are_evaluated_like_the_kernel_does() {
        let judge = |enabled, two_mib, bytes| huge_page_policy(enabled, two_mib, bytes).is_ok();
        let (always, madvise, never) =
            ("[always] madvise never\n", "always [madvise] never\n", "always madvise [never]\n");
        assert!(judge(Some(always), None, Some("2097152\n")));
        assert!(judge(Some(madvise), None, None));
        assert!(!judge(Some(never), None, Some("2097152\n")));
        assert!(judge(Some(never), Some("always inherit [madvise] never"), None));
        assert!(judge(Some(madvise), Some("always [inherit] madvise never"), None));
        assert!(!judge(Some(never), Some("always [inherit] madvise never"), None));
        assert!(!judge(Some(always), Some("always inherit madvise [never]"), None));
        assert!(!judge(Some(always), None, Some("536870912\n")));
        assert!(judge(None, None, None));
    }
}
