//! Errors that several places make, and parts of their texts.

use super::{Error, ErrorKind};
use std::fmt::Display;
use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

/// Number of failures listed in the text of a close.
const FAILURES_LISTED_MAX: usize = 32;

/// Memory by what holds it, for the text of [`ErrorKind::Full`]. All in bytes.
pub(crate) struct Usage {
    pub(crate) bound: u64,
    /// In folios with a reference of a pin or a call in progress.
    pub(crate) pinned: u64,
    pub(crate) unwritten: u64,
    /// In folios of memory files without a swap.
    pub(crate) unswappable: u64,
    /// In folios that were locked or under I/O while the call waited.
    pub(crate) busy: u64,
    /// Dirty bytes that write gates hold back. They are also among the bytes in use, or, if a gate
    /// fails or they are not committed, among those that cannot be written out.
    pub(crate) gated: u64,
    /// In descriptors and tables.
    pub(crate) metadata: u64,
    /// In one piece, for the call.
    pub(crate) wanted: u64,
    /// Free, but in pieces that are too small, or reserved for tables and for reading swapped
    /// pages.
    pub(crate) free: u64,
}

impl Error {
    #[cold]
    pub(crate) fn config(name: &str, problem: impl Display) -> Self {
        Self::new(ErrorKind::Config, format!("{name}: {problem}"))
    }

    /// The kernel refused memory, or a call that manages it.
    #[cold]
    pub(crate) fn memory(purpose: &str, source: io::Error) -> Self {
        let text = format!("the system refused {purpose}: {source}{}", remedy(&source));
        Self::new(ErrorKind::Memory, text).because(Arc::new(source))
    }

    #[cold]
    pub(crate) fn thread(source: io::Error) -> Self {
        let text = format!("the system refused a thread: {source}{}", remedy(&source));
        Self::new(ErrorKind::Thread, text).because(Arc::new(source))
    }

    #[cold]
    pub(crate) fn cannot_open(path: &Path, source: io::Error) -> Self {
        Self::new(ErrorKind::Open, format!("cannot open: {source}{}", limit_of(&source)))
            .in_file(path.display().to_string())
            .because(Arc::new(source))
    }

    #[cold]
    pub(crate) fn writeback(cause: Self) -> Self {
        Self::new(ErrorKind::Writeback, format!("an earlier write-back failed: {cause}"))
            .because(Arc::new(cause))
    }

    #[cold]
    pub(crate) fn swap_read(file: String, position_bytes: u64, source: Self) -> Self {
        let text =
            format!("the page at position {position_bytes} cannot be read from the swap: {source}");
        Self::new(ErrorKind::SwapRead, text)
            .in_file(file)
            .at(position_bytes..position_bytes)
            .because(Arc::new(source))
    }

    #[cold]
    pub(crate) fn page_size(page_bytes: usize) -> Self {
        let text = format!(
            "no cache can be built on this kernel: its pages have {page_bytes} bytes, and a cache \
             needs pages of 4096; boot a kernel with 4 KiB pages"
        );
        Self::new(ErrorKind::Unsupported, text)
    }

    #[cold]
    pub(crate) fn maps_alive(maps: u64) -> Self {
        let text = format!("{maps} maps or pins of maps are still in use; drop them first");
        Self::new(ErrorKind::MapsAlive, text)
    }

    #[cold]
    pub(crate) fn forked() -> Self {
        let text = "this cache belongs to the parent process: a forked child cannot use it";
        Self::new(ErrorKind::Forked, text)
    }

    #[cold]
    pub(crate) fn inside_gate(file: String) -> Self {
        let text = "used by its own write gate, which would wait for itself";
        Self::new(ErrorKind::GateMisuse, text).in_file(file).numbered(libc::EDEADLK)
    }

    #[cold]
    pub(crate) fn cannot_gate(file: String, reason: &str) -> Self {
        let text = format!("cannot have a write gate: {reason}");
        Self::new(ErrorKind::GateMisuse, text).in_file(file)
    }

    /// The file is open with an option that excludes one of this open.
    #[cold]
    pub(crate) fn conflict(file: String, text: String) -> Self {
        Self::new(ErrorKind::OptionConflict, format!("cannot be opened {text}")).in_file(file)
    }

    #[cold]
    pub(crate) fn cannot_map(what: &str, reason: &str) -> Self {
        Self::new(ErrorKind::CannotMap, format!("files cannot be mapped {what}here: {reason}"))
    }

    #[cold]
    pub(crate) fn not_mappable(file: String) -> Self {
        let text = "cannot be mapped: its first open handle was not opened mappable";
        Self::new(ErrorKind::Unsupported, text).in_file(file).numbered(libc::EINVAL)
    }

    /// Files that could not be made durable, at least one.
    #[cold]
    pub(crate) fn close(failures: &[Self]) -> Self {
        let listed = failures.iter().take(FAILURES_LISTED_MAX).map(ToString::to_string);
        let mut text = listed.collect::<Vec<_>>().join("; ");
        if let more @ 1.. = failures.len().saturating_sub(FAILURES_LISTED_MAX) {
            text += &format!("; and {more} more files");
        }
        let error = Self::new(ErrorKind::Close, format!("the cache was not closed: {text}"));
        let Some(first) = failures.first() else { return error };
        error.because(Arc::new(first.clone()))
    }

    /// Nothing can be evicted. `refused` is the kernel's last refusal to evict pages of maps, if
    /// none has been evicted since.
    #[cold]
    pub(crate) fn full(usage: &Usage, cause: Option<Self>, refused: Option<String>) -> Self {
        let Usage { bound, pinned, unwritten, unswappable, busy, gated, metadata, wanted, free } =
            usage;
        let mut text = format!(
            "the cache is full: of {bound} bytes, {pinned} are pinned, {unwritten} cannot be \
             written out, {unswappable} are in memory files without a swap, {busy} are in use by \
             other calls, {gated} are held back by write gates, and {metadata} are descriptors and \
             tables"
        );
        if free >= wanted {
            text += &format!(
                "; {free} are free, but fragmented, in no piece of the {wanted} that are wanted, \
                 or kept for tables and for reads of what is swapped out"
            );
        }
        text += "; unpin, sync, swap (CacheBuilder::swap_directory), or raise the bound \
                 (Cache::set_memory)";
        if let Some(cause) = &cause {
            text += &format!("; what cannot be written: {cause}");
        }
        if let Some(refused) = refused {
            text += &format!("; {refused}");
        }
        let error = Self::new(ErrorKind::Full, text);
        match cause {
            Some(cause) => error.because(Arc::new(cause)),
            None => error,
        }
    }
}

/// Returns the error of an operation on storage, such as "sync", that has failed permanently.
#[cold]
pub(crate) fn io_error(
    file: impl Into<String>,
    operation: impl Display,
    range: Option<Range<u64>>,
    source: io::Error,
) -> Error {
    let text = format!("{operation} failed: {source}{}", limit_of(&source));
    let error = Error::new(ErrorKind::Io, text).in_file(file).because(Arc::new(source));
    match range {
        Some(range) => error.at(range),
        None => error,
    }
}

/// Returns the error of a write to storage that failed permanently, or cannot be made.
#[cold]
pub(crate) fn write_error(file: impl Into<String>, range: Range<u64>, source: io::Error) -> Error {
    let operation = format!("write of {}", of_range(&range));
    io_error(file, operation, Some(range), source)
}

/// Returns the text for a range of bytes.
pub(crate) fn of_range(range: &Range<u64>) -> String {
    format!("{} bytes at position {}", range.end - range.start, range.start)
}

/// Returns a hint at the limit to raise when the system refuses a resource.
fn remedy(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EAGAIN) => {
            "; RLIMIT_NPROC (ulimit -u), a control group's pids.max or, for the stack, RLIMIT_AS \
             or vm.max_map_count is too low"
        }
        Some(libc::ENOMEM) => {
            "; RLIMIT_AS, RLIMIT_DATA, vm.overcommit_memory = 2 or vm.max_map_count may forbid it"
        }
        _ => limit_of(error),
    }
}

/// Returns a hint at the limit to raise when the system refuses a descriptor or a longer file.
pub(crate) fn limit_of(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EMFILE) => "; RLIMIT_NOFILE (ulimit -n) is too low",
        Some(libc::ENFILE) => "; fs.file-max is too low",
        Some(libc::EFBIG) => "; RLIMIT_FSIZE (ulimit -f) or the file system forbids a longer file",
        _ => "",
    }
}
