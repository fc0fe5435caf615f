//! Errors: what went wrong, with file, position, length and cause.
//!
//! A leaf open to all layers. [`Error`] is one word wide, so that a result of a read costs nothing
//! to return; [`Error::kind`] tells the cases apart.

mod convert;

use crate::io::{DirectIo, IoError, OpenDiskError};
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

/// The result of everything that can fail here.
pub type Result<T> = std::result::Result<T, Error>;

/// Something that did not work. Displays as one line that says what, where and why.
///
/// ```
/// # fn main() -> bifolio::Result<()> {
/// use bifolio::{Cache, ErrorKind};
/// let error = Cache::builder().memory(1).build().unwrap_err();
/// assert!(matches!(error.kind(), ErrorKind::Config { .. }));
/// assert!(error.to_string().contains("memory"));
/// # Ok(())
/// # }
/// ```
pub struct Error(Box<ErrorKind>);

impl Error {
    /// The kind of error, with its details.
    pub fn kind(&self) -> &ErrorKind {
        &self.0
    }

    /// Takes the kind out.
    pub fn into_kind(self) -> ErrorKind {
        *self.0
    }
}

impl From<ErrorKind> for Error {
    #[cold]
    fn from(kind: ErrorKind) -> Self {
        Self(Box::new(kind))
    }
}

impl From<IoError> for Error {
    #[cold]
    fn from(error: IoError) -> Self {
        ErrorKind::Io(error).into()
    }
}

impl From<OpenDiskError> for Error {
    #[cold]
    fn from(error: OpenDiskError) -> Self {
        ErrorKind::Open(error).into()
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.0.source()
    }
}

/// The cases of [`Error`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ErrorKind {
    /// A setting of the cache or an option of a file cannot be.
    #[error("{name}: {problem}")]
    Config {
        /// The setting.
        name: &'static str,
        /// The fault of its value, and a value that would be right.
        problem: String,
    },
    /// The file cannot be opened.
    #[error(transparent)]
    Open(#[from] OpenDiskError),
    /// The storage failed. Nothing that was in the cache is lost: what could not be written is
    /// dirty as before.
    #[error(transparent)]
    Io(#[from] IoError),
    /// The system refused a temporary file for the swap.
    #[error("cannot make a temporary swap file in {}: {source}", directory.display())]
    SwapFile {
        /// The directory of [`CacheBuilder::swap_directory`](crate::CacheBuilder::swap_directory).
        directory: PathBuf,
        /// The system's answer.
        source: std::io::Error,
    },
    /// A page of a memory file could not be read back from the swap. It stays there: a later
    /// access tries again.
    #[error("{file}: the page at position {position_bytes} cannot be read from the swap: {source}")]
    SwapRead {
        /// The memory file.
        file: String,
        /// Where the page, or the run of pages, begins in it.
        position_bytes: u64,
        /// The swap file's answer, with its own position.
        source: IoError,
    },
    /// The bytes read back from the swap are not those that were written there.
    #[error(
        "{file}: the page at position {position_bytes} is corrupt in the swap ({swap}, position \
         {swap_position_bytes}): the checksum of what was written is {expected_checksum:#010x}, \
         of what is there {found_checksum:#010x}"
    )]
    SwapCorrupt {
        /// The memory file.
        file: String,
        /// Where the page begins in it.
        position_bytes: u64,
        /// The swap file.
        swap: String,
        /// Where the page stands in that.
        swap_position_bytes: u64,
        /// The checksum as it should be.
        expected_checksum: u32,
        /// The checksum as it is.
        found_checksum: u32,
    },
    /// An earlier write-out failed. Each handle that was open then learns of it once, from its
    /// next sync. The pages are dirty as before and will be tried again.
    #[error("an earlier write-back failed: {0}")]
    Writeback(#[source] Arc<IoError>),
    /// The storage is shorter than it was: another program cut it. To continue without the missing
    /// bytes, call [`set_len`](crate::File::set_len) with the length that the storage has now.
    #[error(
        "{file}: it was cut by somebody else: {expected_bytes} bytes expected at position \
         {position_bytes}, {got_bytes} found; File::set_len to its length now drops the rest"
    )]
    CutShort {
        /// The file.
        file: String,
        /// Where the read began.
        position_bytes: u64,
        /// Bytes that should be there.
        expected_bytes: u64,
        /// Bytes that are there.
        got_bytes: u64,
    },
    /// A range that ends beyond what a file can have: 2^63 - 1 bytes.
    #[error("{file}: {length_bytes} bytes at position {position_bytes} lie beyond 2^63 - 1")]
    OutOfRange {
        /// The file.
        file: String,
        /// Where the range begins.
        position_bytes: u64,
        /// How long it is.
        length_bytes: u64,
    },
    /// A range that ends behind the end of the file, where it must not.
    #[error(
        "{file}: {length_bytes} bytes at position {position_bytes} end behind the end of the \
         file, which has {len_bytes} bytes"
    )]
    PastEnd {
        /// The file.
        file: String,
        /// Where the range begins.
        position_bytes: u64,
        /// How long it is.
        length_bytes: u64,
        /// How long the file is.
        len_bytes: u64,
    },
    /// The file would grow beyond the length its table was reserved for.
    #[error(
        "{file}: cannot grow to {wanted_bytes} bytes: it was opened for at most {len_max_bytes} \
         (OpenOptions::len_max)"
    )]
    TooLong {
        /// The file.
        file: String,
        /// The length that was asked for.
        wanted_bytes: u64,
        /// The most it may have.
        len_max_bytes: u64,
    },
    /// A pin must lie in one folio.
    #[error(
        "{file}: {length_bytes} bytes at position {position_bytes} are not in one folio of \
         {folio_bytes} bytes; `pins` walks several"
    )]
    PinSpansFolios {
        /// The file.
        file: String,
        /// Where the pin was to begin.
        position_bytes: u64,
        /// How long it was to be.
        length_bytes: u64,
        /// Bytes of a folio of this file.
        folio_bytes: u64,
    },
    /// The handle was not opened for this.
    #[error("{file}: not opened for {operation}")]
    NotOpenedFor {
        /// The file.
        file: String,
        /// The operation that was tried.
        operation: &'static str,
    },
    /// Only a memory file can do this.
    #[error("{file}: cannot {operation}: it is not a memory file")]
    NotAMemoryFile {
        /// The file.
        file: String,
        /// The operation that was tried.
        operation: &'static str,
    },
    /// A file that can be mapped cannot do this: each of its pages has its place.
    #[error("{file}: cannot {operation}: it was opened to be mapped")]
    IsMappable {
        /// The file.
        file: String,
        /// The operation that was tried.
        operation: &'static str,
    },
    /// Files cannot be mapped on this system.
    #[error("files cannot be mapped here: {reason}")]
    CannotMap {
        /// The finding of the probe.
        reason: String,
    },
    /// Files cannot be mapped for writing on this system, only for reading.
    #[error("files cannot be mapped for writing here: {reason}")]
    CannotMapMut {
        /// The finding of the probe.
        reason: String,
    },
    /// A page of a map could not be had when it was touched.
    #[error("a page of a map could not be had: {0}")]
    Fault(#[source] Arc<Error>),
    /// Only a file that was opened to be mapped can be mapped.
    #[error("{file}: cannot be mapped: its first open handle was not opened mappable")]
    NotMappable {
        /// The file.
        file: String,
    },
    /// Maps of files of the cache, or pins of maps, are in use.
    #[error("{maps} maps or pins of maps are still in use; drop them first")]
    MapsAlive {
        /// How many.
        maps: u64,
    },
    /// A range of a memory file cannot become one folio.
    #[error(
        "{file}: {length_bytes} bytes at position {position_bytes} cannot become one folio: \
         {refusal}"
    )]
    CannotCollapse {
        /// The file.
        file: String,
        /// Where the range begins.
        position_bytes: u64,
        /// How long it is.
        length_bytes: u64,
        /// Why.
        refusal: CollapseRefusal,
    },
    /// A descriptor did not take what was to be copied to it.
    #[error(
        "{file}: {length_bytes} bytes at position {position_bytes} could not be copied to the \
         descriptor: {source}"
    )]
    CopyToFd {
        /// The file.
        file: String,
        /// The first byte that was not taken.
        position_bytes: u64,
        /// How many bytes were left.
        length_bytes: u64,
        /// The descriptor's answer.
        source: std::io::Error,
    },
    /// An immutable and a writable handle of one file exclude each other.
    #[error("{file}: cannot be opened {wanted}: it is open {open} in this cache")]
    ImmutableConflict {
        /// The file.
        file: String,
        /// The setting that was asked for.
        wanted: &'static str,
        /// The setting of the other handles.
        open: &'static str,
    },
    /// Another program, or another cache, has locked the file
    /// ([`OpenOptions::exclusive`](crate::OpenOptions::exclusive)).
    #[error("{file}: cannot be opened exclusively: another program or cache has locked it")]
    Locked {
        /// The file.
        file: String,
    },
    /// The file is open, and its transfers go another way than asked for.
    #[error("{file}: cannot be opened with {wanted:?}: it is open in this cache, and {reason}")]
    DirectConflict {
        /// The file.
        file: String,
        /// The setting that was asked for.
        wanted: DirectIo,
        /// How its transfers go, and why.
        reason: String,
    },
    /// A backing asks for transfers that no memory is aligned for.
    #[error(
        "{file}: the alignment of the backing is {memory_bytes} bytes in memory and {offset_bytes} \
         of positions: each must be a power of two from 1 to 4096"
    )]
    InvalidAlignment {
        /// The backing.
        file: String,
        /// [`Alignment::memory_bytes`](crate::Alignment::memory_bytes).
        memory_bytes: u64,
        /// [`Alignment::offset_bytes`](crate::Alignment::offset_bytes).
        offset_bytes: u64,
    },
    /// The file is open, and an option of that open excludes this one.
    #[error(
        "{file}: cannot be opened with {option} {wanted}: it is open in this cache with {open}"
    )]
    OptionConflict {
        /// The file.
        file: String,
        /// The option.
        option: &'static str,
        /// The value that was asked for.
        wanted: String,
        /// The value it has while the file is open.
        open: String,
    },
    /// The call needs a folio that its own thread has as a [`PinMut`](crate::PinMut): it would wait
    /// for itself. Drop the pin first.
    #[error("{file}: {length_bytes} bytes at {position_bytes} are a PinMut of the calling thread")]
    PinnedByCaller {
        /// The file.
        file: String,
        /// Where the folio begins.
        position_bytes: u64,
        /// How long it is.
        length_bytes: u64,
    },
    /// The file is open with another folio size.
    #[error("{file}: cannot be opened with folios of {wanted_bytes} bytes: it has {open_bytes}")]
    FolioSizeConflict {
        /// The file.
        file: String,
        /// The folio size that was asked for.
        wanted_bytes: u64,
        /// The folio size it has while it is open.
        open_bytes: u64,
    },
    /// The device of the file takes nothing, and as much is dirty there as may be
    /// ([`CacheBuilder::dirty_bytes_max`](crate::CacheBuilder::dirty_bytes_max)): a page that is
    /// clean cannot be changed. Nothing that was written before is lost; what is dirty already can
    /// be changed; and once the device takes some of it, writes go on.
    #[error(
        "{file}: {length_bytes} bytes at position {position_bytes} cannot be accepted: \
         {dirty_bytes} bytes wait for a device that takes nothing: {cause}"
    )]
    Unwritable {
        /// The file.
        file: String,
        /// Where the part of the write begins that was not accepted.
        position_bytes: u64,
        /// How long it is.
        length_bytes: u64,
        /// Dirty bytes on the device of the file.
        dirty_bytes: u64,
        /// The answer of the device, to a write-out of this file or of another one there;
        /// [`TimedOut`](std::io::ErrorKind::TimedOut) if it has not answered for long.
        #[source]
        cause: Arc<IoError>,
    },
    /// The bound is reached and nothing can be evicted.
    #[error(
        "the cache is full: of {bound_bytes} bytes, {pinned_bytes} are pinned, {unwritten_bytes} \
         cannot be written out, {unswappable_bytes} are in memory files without a swap, \
         {busy_bytes} are in use by other calls, and {metadata_bytes} are descriptors and tables\
         {}; unpin, sync, swap (CacheBuilder::swap_directory), or raise the bound \
         (Cache::set_memory){}{}",
        fragmentation(*free_bytes, *wanted_bytes),
        because(cause),
        refused.as_ref().map_or_else(String::new, |refused| format!("; {refused}"))
    )]
    Full {
        /// The bound.
        bound_bytes: u64,
        /// In folios that pins, holds or calls in progress refer to.
        pinned_bytes: u64,
        /// In folios whose write-out failed.
        unwritten_bytes: u64,
        /// In folios of memory files, which have nowhere to go.
        unswappable_bytes: u64,
        /// In folios that were locked or under I/O, for as long as the call waited.
        busy_bytes: u64,
        /// Descriptors and tables, which stay while the cache and its files are open.
        metadata_bytes: u64,
        /// Bytes that were wanted, in one piece.
        wanted_bytes: u64,
        /// Free all the same: in pieces that are too small, or kept for tables and for reads of
        /// what is swapped out.
        free_bytes: u64,
        /// Why what cannot be written out cannot: what its device has answered, with the file and
        /// the position.
        #[source]
        cause: Option<Arc<IoError>>,
        /// What the kernel refused when pages of maps were last to be evicted, if none could be
        /// since.
        refused: Option<String>,
    },
    /// A folio has as many references as one can have.
    #[error(
        "{file}: the page at position {position_bytes} is pinned {pins} times, the most allowed"
    )]
    TooManyPins {
        /// The file.
        file: String,
        /// Where.
        position_bytes: u64,
        /// How often.
        pins: u64,
    },
    /// The kernel refused memory or address space that the bound allows, or what goes with it.
    #[error("the system refused {purpose}: {source}{}", remedy(source))]
    Memory {
        /// The use that the memory was for.
        purpose: &'static str,
        /// Its answer.
        source: std::io::Error,
    },
    /// A thread could not be started.
    #[error("the system refused a thread: {0}{remedy}", remedy = remedy(.0))]
    Thread(#[source] std::io::Error),
    /// Files could not be made durable: the cache is still open, and nothing is lost.
    #[error("the cache was not closed: {}", list(failures))]
    Close {
        /// Each file that is not durable, and why. All others are.
        failures: Vec<CloseFailure>,
    },
    /// The kernel refused something that could neither be undone nor done without, for a page of a
    /// map. What is resident can still be read; nothing else works any more, and nothing is written
    /// out: build another cache, and begin with what the devices hold.
    #[error("the cache cannot be relied upon any more: {what}: {source}")]
    Poisoned {
        /// The step that failed.
        what: &'static str,
        /// The kernel's answer.
        source: Arc<std::io::Error>,
    },
    /// The cache was closed.
    #[error("the cache is closed")]
    Closed,
    /// The process was forked after the cache was built; the child cannot use it. Nor should it
    /// build one: locks of the process may stay held for good by threads that it does not have. Let
    /// it run another program.
    #[error("this cache belongs to the parent process: a forked child cannot use it")]
    Forked,
}

/// The part of a full cache's message about memory that is free all the same.
fn fragmentation(free_bytes: u64, wanted_bytes: u64) -> String {
    if free_bytes < wanted_bytes {
        return String::new();
    }
    format!(
        "; {free_bytes} are free, but fragmented, in no piece of the {wanted_bytes} that are \
         wanted, or kept for tables and for reads of what is swapped out"
    )
}

/// How many failures a message lists.
const FAILURES_LISTED_MAX: usize = 4;

/// A hint at the setting to change, where the system refuses something.
fn remedy(error: &std::io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EMFILE) => "; RLIMIT_NOFILE (ulimit -n) is too low",
        Some(libc::ENFILE) => "; fs.file-max is too low",
        Some(libc::EAGAIN) => "; RLIMIT_NPROC (ulimit -u) or a control group's pids.max is too low",
        Some(libc::ENOMEM) => {
            "; RLIMIT_AS, RLIMIT_DATA, vm.overcommit_memory = 2 or vm.max_map_count may forbid it"
        }
        _ => "",
    }
}

fn list(failures: &[CloseFailure]) -> String {
    let listed = failures.iter().take(FAILURES_LISTED_MAX).map(ToString::to_string);
    let mut text = listed.collect::<Vec<_>>().join("; ");
    if let more @ 1.. = failures.len().saturating_sub(FAILURES_LISTED_MAX) {
        text += &format!("; and {more} more files");
    }
    text
}

/// A file that could not be made durable.
#[derive(Debug, thiserror::Error)]
#[error("{file}: {unwritten_bytes} bytes are not written, or not flushed: {cause}")]
#[non_exhaustive]
pub struct CloseFailure {
    /// The file.
    pub file: String,
    /// Bytes in dirty folios, each counted whole, also behind the end of the file. If there are
    /// none, what was written could not be flushed. Where the kernel does not tell which pages of a
    /// map were stored to, every resident page counts as dirty.
    pub unwritten_bytes: u64,
    /// The last failure, with its operation and position.
    #[source]
    pub cause: Error,
}

/// A file without a handle whose unwritten bytes were given up.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Discarded {
    /// The file.
    pub file: String,
    /// Bytes of the file that were in dirty folios, as
    /// [`File::discard_dirty`](crate::File::discard_dirty) counts them.
    pub bytes: u64,
}

/// The end of a message, if there is a cause.
fn because(cause: &Option<Arc<IoError>>) -> String {
    cause.as_ref().map_or_else(String::new, |cause| format!("; what cannot be written: {cause}"))
}

/// Why a range of a memory file cannot become one folio.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CollapseRefusal {
    /// Not a power of two of folios, aligned to its length, of 2 MiB at the most, in the file.
    #[error(
        "a folio is a power of two up to 2 MiB, starts at a multiple of its length, and begins \
         before the end of the file"
    )]
    NotAFolio,
    /// A page of it is a hole.
    #[error("there is a hole in it")]
    Hole,
    /// A page of it is pinned, or was in use for as long as the call tried.
    #[error("it is pinned, or in use")]
    InUse,
    /// There is no memory in one piece for the new folio, or not for the old ones beside it.
    /// Reclaim has been asked for some: a later call may find it.
    #[error(
        "there is no room for it in one piece; try again later, or raise the bound \
         (Cache::set_memory)"
    )]
    NoRoom,
}
