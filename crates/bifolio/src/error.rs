//! Errors: what went wrong, with file, position, length and cause.
//!
//! A leaf open to all layers. [`Error`] is one word wide, so that returning the result of a read is
//! cheap; [`Error::kind`] returns the case.

mod convert;
mod messages;

use crate::io::{DirectIo, IoError, OpenDiskError};
use messages::{because, fragmentation, held_because, list, remedy};
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

/// The result type of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// An error of the cache. Formats as one line with what failed, where, and why.
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
    /// Returns the kind of error with its details.
    pub fn kind(&self) -> &ErrorKind {
        &self.0
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
    /// A setting of the cache or an option of a file is invalid.
    #[error("{name}: {problem}")]
    Config {
        /// The setting.
        name: &'static str,
        /// Reason why its value is invalid, and the valid values.
        problem: String,
    },
    /// The file cannot be opened.
    #[error(transparent)]
    Open(#[from] OpenDiskError),
    /// The storage failed. Nothing in the cache is lost: what could not be written stays dirty.
    #[error(transparent)]
    Io(#[from] IoError),
    /// The system refused a temporary file for the swap.
    #[error("cannot make a temporary swap file in {}: {source}", directory.display())]
    SwapFile {
        /// The directory of [`CacheBuilder::swap_directory`](crate::CacheBuilder::swap_directory).
        directory: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// A page of a memory file could not be read from the swap. It stays there, and a later access
    /// tries again.
    #[error("{file}: the page at position {position_bytes} cannot be read from the swap: {source}")]
    SwapRead {
        /// The memory file.
        file: String,
        /// Position of the page, or of the run of pages, in the file.
        position_bytes: u64,
        /// The error of the swap file, with the position there.
        source: IoError,
    },
    /// The bytes read from the swap are not those that were written there.
    #[error(
        "{file}: the page at position {position_bytes} is corrupt in the swap ({swap}, position \
         {swap_position_bytes}): the checksum of what was written is {expected_checksum:#010x}, \
         of what is there {found_checksum:#010x}"
    )]
    SwapCorrupt {
        /// The memory file.
        file: String,
        /// Position of the page in the file.
        position_bytes: u64,
        /// The swap file.
        swap: String,
        /// Position of the page in the swap file.
        swap_position_bytes: u64,
        /// Checksum of the bytes that were written.
        expected_checksum: u32,
        /// Checksum of the bytes that were read.
        found_checksum: u32,
    },
    /// The write gate of the file ([`GatedFile`](crate::GatedFile)) holds dirty pages
    /// back that this sync, or one that shared its flush, was to write: its call has failed, or a
    /// page is not committed. They stay dirty. All other pages are durable.
    #[error(
        "{file}: the write gate holds back {held_bytes} bytes: {}",
        held_because(*lsn, cause.as_ref())
    )]
    Gated {
        /// The file.
        file: String,
        /// Lowest LSN that is not durable; [`u64::MAX`] if all of the pages are not committed.
        lsn: u64,
        /// Bytes in the pages that are held back.
        held_bytes: u64,
        /// The error of the gate, if its call has failed.
        #[source]
        cause: Option<std::io::Error>,
    },
    /// A write gate has used the file that it is set for: it would wait for itself.
    #[error("{file}: used by its own write gate, which would wait for itself")]
    InsideGate {
        /// The file.
        file: String,
    },
    /// A write gate cannot be set for this file.
    #[error("{file}: cannot have a write gate: {reason}")]
    CannotGate {
        /// The file.
        file: String,
        /// The reason.
        reason: &'static str,
    },
    /// An earlier write-out failed. The next sync of each handle that was open then returns this
    /// error once. The pages stay dirty and are written again.
    #[error("an earlier write-back failed: {0}")]
    Writeback(#[source] Arc<IoError>),
    /// The storage has shrunk: another program truncated it. To continue without the missing bytes,
    /// call [`set_len`](crate::File::set_len) with the length that the storage has now.
    #[error(
        "{file}: another program truncated it: {expected_bytes} bytes expected at position \
         {position_bytes}, {got_bytes} found; File::set_len to its length now drops the rest"
    )]
    CutShort {
        /// The file.
        file: String,
        /// Position of the read.
        position_bytes: u64,
        /// Bytes expected.
        expected_bytes: u64,
        /// Bytes found.
        got_bytes: u64,
    },
    /// The byte is not in memory, or another thread is changing its page
    /// ([`File::try_read_at`](crate::File::try_read_at)).
    #[error("{file}: the byte at position {position_bytes} cannot be read without waiting")]
    WouldBlock {
        /// The file.
        file: String,
        /// Position of the first byte that would have to be waited for.
        position_bytes: u64,
    },
    /// A range ends past the maximum length of a file, 2^63 - 1 bytes.
    #[error("{file}: {length_bytes} bytes at position {position_bytes} lie beyond 2^63 - 1")]
    OutOfRange {
        /// The file.
        file: String,
        /// Position of the range.
        position_bytes: u64,
        /// Length, bytes.
        length_bytes: u64,
    },
    /// A range ends past the end of the file, where that is not allowed.
    #[error(
        "{file}: {length_bytes} bytes at position {position_bytes} end past the end of the \
         file, which has {len_bytes} bytes"
    )]
    PastEnd {
        /// The file.
        file: String,
        /// Position of the range.
        position_bytes: u64,
        /// Length, bytes.
        length_bytes: u64,
        /// Length of the file, bytes.
        len_bytes: u64,
    },
    /// The file would grow past its maximum length: that of its first open
    /// ([`OpenOptions::len_max`](crate::OpenOptions::len_max)), or as raised since
    /// ([`File::raise_len_max`](crate::File::raise_len_max)).
    #[error(
        "{file}: cannot grow to {wanted_bytes} bytes, only to {len_max_bytes} \
         (OpenOptions::len_max, File::raise_len_max)"
    )]
    TooLong {
        /// The file.
        file: String,
        /// Requested length, bytes.
        wanted_bytes: u64,
        /// Maximum length of this open file, bytes.
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
        /// Position of the pin.
        position_bytes: u64,
        /// Length of the pin, bytes.
        length_bytes: u64,
        /// Folio size of this file, bytes.
        folio_bytes: u64,
    },
    /// The handle was not opened for this operation.
    #[error("{file}: not opened for {operation}")]
    NotOpenedFor {
        /// The file.
        file: String,
        /// The operation.
        operation: &'static str,
    },
    /// The operation does not work on mappable files, whose pages have fixed addresses.
    #[error("{file}: cannot {operation}: it was opened to be mapped")]
    IsMappable {
        /// The file.
        file: String,
        /// The operation.
        operation: &'static str,
    },
    /// Files cannot be mapped on this system.
    #[error("files cannot be mapped here: {reason}")]
    CannotMap {
        /// The result of the probe.
        reason: String,
    },
    /// Files can be mapped only for reading on this system.
    #[error("files cannot be mapped for writing here: {reason}")]
    CannotMapMut {
        /// The result of the probe.
        reason: String,
    },
    /// A page of a map could not be read when it was touched.
    #[error("a page of a map could not be read: {0}")]
    Fault(#[source] Arc<Error>),
    /// The file was not opened [`mappable`](crate::OpenOptions::mappable).
    #[error("{file}: cannot be mapped: its first open handle was not opened mappable")]
    NotMappable {
        /// The file.
        file: String,
    },
    /// Maps of files of the cache, or pins of maps, still exist.
    #[error("{maps} maps or pins of maps are still in use; drop them first")]
    MapsAlive {
        /// Number of maps and pins.
        maps: u64,
    },
    /// A descriptor did not accept the bytes of a [`copy_to_fd`](crate::File::copy_to_fd).
    #[error(
        "{file}: {length_bytes} bytes at position {position_bytes} could not be copied to the \
         descriptor: {source}"
    )]
    CopyToFd {
        /// The file.
        file: String,
        /// Position of the first byte that was not accepted.
        position_bytes: u64,
        /// Number of bytes that were not accepted.
        length_bytes: u64,
        /// The error of the descriptor.
        source: std::io::Error,
    },
    /// An immutable and a writable handle of one file exclude each other.
    #[error("{file}: cannot be opened {wanted}: it is open {open} in this cache")]
    ImmutableConflict {
        /// The file.
        file: String,
        /// The requested setting.
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
    /// The file is open, with another kind of transfers than requested.
    #[error("{file}: cannot be opened with {wanted:?}: it is open in this cache, and {reason}")]
    DirectConflict {
        /// The file.
        file: String,
        /// The requested setting.
        wanted: DirectIo,
        /// The kind of its transfers, and the reason.
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
        /// [`Alignment::memory_bytes`](crate::backing::Alignment::memory_bytes).
        memory_bytes: u64,
        /// [`Alignment::offset_bytes`](crate::backing::Alignment::offset_bytes).
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
        /// The requested value.
        wanted: String,
        /// The value of the open file.
        open: String,
    },
    /// The call needs a folio that its own thread has as a [`PageRefMut`](crate::PageRefMut): it
    /// would wait for itself. Drop the pin first.
    #[error(
        "{file}: {length_bytes} bytes at {position_bytes} are a PageRefMut of the calling thread"
    )]
    PinnedByCaller {
        /// The file.
        file: String,
        /// Position of the folio.
        position_bytes: u64,
        /// Length, bytes.
        length_bytes: u64,
    },
    /// The file is open with another folio size.
    #[error("{file}: cannot be opened with folios of {wanted_bytes} bytes: it has {open_bytes}")]
    FolioSizeConflict {
        /// The file.
        file: String,
        /// Requested folio size, bytes.
        wanted_bytes: u64,
        /// Folio size of the open file, bytes.
        open_bytes: u64,
    },
    /// The device of the file refuses writes, and the dirty limit is reached
    /// ([`CacheBuilder::dirty_max`](crate::CacheBuilder::dirty_max)), so a clean page
    /// cannot be modified. Nothing written earlier is lost. Pages that are dirty already can be
    /// modified, and all writes succeed again once the device accepts some pages.
    #[error(
        "{file}: {length_bytes} bytes at position {position_bytes} cannot be accepted: \
         {dirty_bytes} bytes wait for a device that takes nothing: {cause}"
    )]
    Unwritable {
        /// The file.
        file: String,
        /// Position of the part of the write that was not accepted.
        position_bytes: u64,
        /// Length, bytes.
        length_bytes: u64,
        /// Dirty bytes on the device of the file.
        dirty_bytes: u64,
        /// The device's error for a write-out of this file or of another file on it;
        /// [`TimedOut`](std::io::ErrorKind::TimedOut) if it has not answered.
        #[source]
        cause: Arc<IoError>,
    },
    /// The bound is reached and nothing can be evicted.
    #[error(
        "the cache is full: of {bound_bytes} bytes, {pinned_bytes} are pinned, {unwritten_bytes} \
         cannot be written out, {unswappable_bytes} are in memory files without a swap, \
         {busy_bytes} are in use by other calls, {gated_bytes} are held back by write gates, and \
         {metadata_bytes} are descriptors and tables{}; unpin, sync, swap \
         (CacheBuilder::swap_directory), or raise the bound (Cache::set_memory){}{}",
        fragmentation(*free_bytes, *wanted_bytes),
        because(cause),
        refused.as_ref().map_or_else(String::new, |refused| format!("; {refused}"))
    )]
    Full {
        /// The bound on memory, bytes.
        bound_bytes: u64,
        /// Bytes in folios with a reference of a pin, a hold or a call in progress.
        pinned_bytes: u64,
        /// Bytes in folios whose write-out failed.
        unwritten_bytes: u64,
        /// Bytes in folios of memory files without a swap.
        unswappable_bytes: u64,
        /// Bytes in folios that were locked or under I/O while the call waited.
        busy_bytes: u64,
        /// Dirty bytes that write gates hold back, because their log is not durable. They are also
        /// among the bytes in use, or, if a gate fails or they are not committed, among those that
        /// cannot be written out.
        gated_bytes: u64,
        /// Bytes in descriptors and tables.
        metadata_bytes: u64,
        /// Contiguous bytes that the call needed.
        wanted_bytes: u64,
        /// Bytes that are free, but in pieces that are too small, or reserved for tables and for
        /// reading swapped pages.
        free_bytes: u64,
        /// The error for pages that cannot be written: the device's, with file and position, or
        /// that of a write gate.
        #[source]
        cause: Option<Arc<IoError>>,
        /// The kernel's last refusal to evict pages of maps, if none has been evicted since.
        refused: Option<String>,
    },
    /// The bound cannot fall ([`Cache::set_memory`](crate::Cache::set_memory)): what is dirty does
    /// not fit in its new share, and cannot be written out now.
    #[error(
        "the bound cannot fall to {bound_bytes} bytes: {used_bytes} bytes are {limit}, of which \
         {max_bytes} may be (CacheBuilder::dirty_max): {cause}"
    )]
    BoundInUse {
        /// The bound that was wanted, bytes.
        bound_bytes: u64,
        /// The file, or one of the files, that the dirty bytes belong to.
        file: String,
        /// The limit that they exceed.
        limit: &'static str,
        /// Dirty bytes that count for the limit.
        used_bytes: u64,
        /// Maximum under the bound that was wanted, bytes.
        max_bytes: u64,
        /// The error of the device or of the write gate;
        /// [`TimedOut`](std::io::ErrorKind::TimedOut) if it has not answered.
        #[source]
        cause: Arc<IoError>,
    },
    /// A folio has the maximum number of references.
    #[error(
        "{file}: the page at position {position_bytes} is pinned {pins} times, the most allowed"
    )]
    TooManyPins {
        /// The file.
        file: String,
        /// Position of the page.
        position_bytes: u64,
        /// Number of references.
        pins: u64,
    },
    /// The kernel refused memory or address space that the bound allows, or a call that manages it.
    #[error("the system refused {purpose}: {source}{}", remedy(source))]
    Memory {
        /// The purpose of the memory.
        purpose: &'static str,
        /// The kernel's error.
        source: std::io::Error,
    },
    /// A thread could not be started.
    #[error("the system refused a thread: {0}{remedy}", remedy = remedy(.0))]
    Thread(#[source] std::io::Error),
    /// Files could not be made durable. The cache is still open, and nothing is lost.
    #[error("the cache was not closed: {}", list(failures))]
    Close {
        /// The files that are not durable, with the reasons. All others are durable.
        failures: Vec<CloseFailure>,
    },
    /// The kernel refused a step of an eviction or a fault that could be neither undone nor
    /// skipped. Resident pages can be read; every other call fails, and nothing is written out.
    /// Build another cache and start from what the devices hold.
    #[error("the cache is poisoned: {what}: {source}")]
    Poisoned {
        /// The step that failed.
        what: &'static str,
        /// The kernel's error.
        source: Arc<std::io::Error>,
    },
    /// The cache was closed.
    #[error("the cache is closed")]
    Closed,
    /// The process was forked after the cache was built; the child cannot use the cache. It should
    /// not build one either, because locks of the process may be held by threads that do not exist
    /// in the child. Let the child execute another program.
    #[error("this cache belongs to the parent process: a forked child cannot use it")]
    Forked,
}

/// A file that could not be made durable.
#[derive(Debug, thiserror::Error)]
#[error("{file}: {unwritten_bytes} bytes are not written, or not flushed: {cause}")]
#[non_exhaustive]
pub struct CloseFailure {
    /// The file.
    pub file: String,
    /// Bytes in dirty folios; each counts as a whole, even past the end of the file. 0 if
    /// everything was written but not flushed. If the kernel does not report which pages of a map
    /// were stored to, every resident page counts as dirty.
    pub unwritten_bytes: u64,
    /// The last failure, with its operation and position.
    #[source]
    pub cause: Error,
}
