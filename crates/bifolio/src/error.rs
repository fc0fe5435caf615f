//! Errors: what went wrong, with file, range and cause.
//!
//! A leaf open to all layers. [`Error`] is one word wide, so that returning the result of a read is
//! cheap. Its text is written where the error is made.

use std::error::Error as StdError;
use std::fmt::{self, Display};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::{io, iter};

const FAILURES_LISTED_MAX: usize = 32;

/// The result type of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// An error of the cache. Formats as one line with what failed, where, and why.
///
/// A clone is the same error. The causes follow by [`source`](std::error::Error::source), down to
/// the [`std::io::Error`] of the system if there is one.
///
/// ```
/// use bifolio::{Cache, ErrorKind};
/// let error = Cache::builder().memory(1).build().unwrap_err();
/// assert_eq!(error.kind(), ErrorKind::Config);
/// assert!(error.to_string().contains("memory"));
/// # Ok::<(), bifolio::Error>(())
/// ```
#[derive(Clone)]
pub struct Error(Arc<Inner>);

struct Inner {
    kind: ErrorKind,
    errno: Option<i32>,
    file: Option<String>,
    range: Option<Range<u64>>,
    /// The text without the name of the file, which goes before it.
    message: String,
    cause: Option<Arc<dyn StdError + Send + Sync>>,
}

impl Error {
    #[cold]
    pub(crate) fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        let message = message.into();
        Self(Arc::new(Inner { kind, errno: None, file: None, range: None, message, cause: None }))
    }

    /// Names the file, also at the start of the text.
    pub(crate) fn in_file(self, file: impl Into<String>) -> Self {
        self.with(|inner| inner.file = Some(file.into()))
    }

    pub(crate) fn at(self, range: Range<u64>) -> Self {
        self.with(|inner| inner.range = Some(range))
    }

    /// Sets the cause, which the text has to name.
    pub(crate) fn because(self, cause: Arc<impl StdError + Send + Sync + 'static>) -> Self {
        self.with(|inner| inner.cause = Some(cause))
    }

    /// Sets the number for an error without one of the system, if that of the kind does not fit.
    pub(crate) fn numbered(self, errno: i32) -> Self {
        self.with(|inner| inner.errno = Some(errno))
    }

    /// Names the bytes of a file for which a cache that is full has no memory.
    pub(crate) fn wanted_for(self, file: impl FnOnce() -> String, range: Range<u64>) -> Self {
        if self.kind() != ErrorKind::Full || self.0.file.is_some() {
            return self;
        }
        self.with(|inner| {
            inner.message = format!("no memory for {}: {}", of_range(&range), inner.message);
            inner.file = Some(file());
            inner.range = Some(range);
        })
    }

    /// Names the bound that a cache which is full cannot have.
    pub(crate) fn of_bound(self, bound: u64) -> Self {
        let text = format!("the bound cannot fall to {bound} bytes: {}", self.0.message);
        self.with(|inner| inner.message = text)
    }

    /// Says that a class of files is full, if the error says that the cache is.
    pub(crate) fn of_class(self, class: &str, ceiling: u64) -> Self {
        if self.kind() != ErrorKind::Full {
            return self;
        }
        let text = format!(
            "class `{class}` has as much as its ceiling of {ceiling} bytes allows, and none of its \
             pages can be evicted: {}",
            self.0.message
        );
        self.with(|inner| inner.message = text)
    }

    fn with(mut self, change: impl FnOnce(&mut Inner)) -> Self {
        let inner = Arc::get_mut(&mut self.0);
        debug_assert!(inner.is_some(), "an error changes only before it is shared");
        inner.map(change);
        self
    }

    /// Returns the kind.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// Returns the name of the file in the cache: its path as given, or the result of
    /// [`Backing::describe`](crate::backing::Backing::describe). An error without a file of its own
    /// returns the file of its cause; `None` if the cause has none either.
    pub fn file(&self) -> Option<&str> {
        self.0.file.as_deref().or_else(|| self.cause()?.file())
    }

    /// Returns the bytes of [`Self::file`] that the error is about: of the call, or the part of
    /// them that failed. `None` if it is about no range.
    pub fn range(&self) -> Option<Range<u64>> {
        match self.0.file {
            Some(_) => self.0.range.clone(),
            None => self.cause()?.range(),
        }
    }

    /// Returns the cause, if it is an error of the cache.
    fn cause(&self) -> Option<&Self> {
        self.source()?.downcast_ref()
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}({:?})", self.0.kind, self.to_string())
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(file) = &self.0.file {
            write!(f, "{file}: ")?;
        }
        f.write_str(&self.0.message)
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.0.cause.as_deref().map(|cause| cause as _)
    }
}

/// The kinds of [`Error`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// A setting of the cache, an option of a file or an argument is invalid, or two contradict
    /// each other.
    Config,
    /// The file cannot be opened.
    Open,
    /// The file is not regular, or the kernel does not know its length.
    NotRegular,
    /// The storage failed. Nothing in the cache is lost: what could not be written stays dirty.
    Io,
    /// The system refused a temporary file for the swap.
    SwapFile,
    /// A page of a memory file could not be read from the swap. It stays there, and a later access
    /// tries again.
    SwapRead,
    /// The bytes read from the swap are not those that were written there.
    SwapCorrupt,
    /// The [`PageCodec`](crate::PageCodec) of the file refuses a page that was read.
    CorruptPage,
    /// The write gate of the file ([`GatedFile`](crate::GatedFile)) holds dirty pages back: its
    /// call has failed, or a page is not committed. They stay dirty. All other pages are durable.
    Gated,
    /// The file cannot have a write gate; or its gate has used it and would wait for itself; or a
    /// [`File`](crate::File) would change a file that has a gate: use the
    /// [`GatedFile`](crate::GatedFile).
    GateMisuse,
    /// A write-out failed, during the call or before it. The next sync of each handle that was open
    /// then returns this error once. The pages stay dirty and are written again.
    Writeback,
    /// The storage has shrunk: another program truncated it. To continue without the missing bytes,
    /// call [`set_len`](crate::File::set_len) with the length that the storage has now.
    CutShort,
    /// The byte is not in memory, or another thread is changing its page
    /// ([`File::try_read_at`](crate::File::try_read_at)).
    WouldBlock,
    /// A range ends past the maximum length of a file, 2^63 - 1 bytes.
    OutOfRange,
    /// A range ends past the end of the file, where that is not allowed.
    PastEnd,
    /// The file would grow past its maximum length
    /// ([`OpenOptions::len_max`](crate::OpenOptions::len_max)).
    TooLong,
    /// A pin must lie in one folio.
    PinSpansFolios,
    /// The handle was not opened for this operation.
    NotOpenedFor,
    /// The file, or its file system, does not support the operation: it works only or not on
    /// [`mappable`](crate::OpenOptions::mappable) files, or needs direct I/O. Or the kernel's pages
    /// are not of 4 KiB ([`CacheBuilder::build`](crate::CacheBuilder::build)).
    Unsupported,
    /// Files cannot be mapped on this system, or only for reading.
    CannotMap,
    /// A page of a map could not be read when it was touched.
    Fault,
    /// Maps of files of the cache, or pins of maps, still exist.
    MapsAlive,
    /// Another program, or another cache, has locked the file
    /// ([`OpenOptions::exclusive`](crate::OpenOptions::exclusive)).
    Locked,
    /// The file is open in this cache, and an option of that open excludes one of this open.
    OptionConflict,
    /// The call needs a folio that its own thread has as a [`PageRefMut`](crate::PageRefMut): it
    /// would wait for itself. Drop the pin first.
    PinnedByCaller,
    /// The device of the file refuses writes, and the dirty limit is reached
    /// ([`CacheBuilder::dirty_max`](crate::CacheBuilder::dirty_max)), so a clean page cannot be
    /// modified. Nothing is lost, and writes succeed again once the device accepts some pages.
    Unwritable,
    /// The bound is reached and nothing can be evicted. The text says what holds the memory.
    Full,
    /// The bound cannot fall ([`Cache::set_memory`](crate::Cache::set_memory)): what is dirty does
    /// not fit in its new share, and cannot be written out now.
    BoundInUse,
    /// A folio has the maximum number of references.
    TooManyPins,
    /// The kernel refused memory or address space that the bound allows, or a call that manages it.
    Memory,
    /// A thread could not be started.
    Thread,
    /// Files could not be made durable. The cache is still open, and nothing is lost. The text
    /// lists the files; [`Error::file`] and the cause are those of the first.
    Close,
    /// The kernel refused a step of an eviction or a fault that could be neither undone nor
    /// skipped. Resident pages can be read; every other call fails, and nothing is written out.
    /// Build another cache and start from what the devices hold.
    Poisoned,
    /// The cache was closed.
    Closed,
    /// The process was forked after the cache was built; the child cannot use the cache. It should
    /// not build one either, unless the library was built with the feature `fork`.
    Forked,
}

impl Error {
    /// Returns the number of the system error that caused this error, if there is one: `ENOSPC` for
    /// a page that a full disk refused, also when a later sync or close reports it.
    ///
    /// ```
    /// use bifolio::{Cache, OpenOptions};
    /// let cache = Cache::builder().memory(1 << 20).build()?;
    /// let error = cache.open("/no/such/file", &OpenOptions::new()).unwrap_err();
    /// assert_eq!(error.raw_os_error(), Some(2));
    /// assert_eq!(std::io::Error::from(error).kind(), std::io::ErrorKind::NotFound);
    /// # Ok::<(), bifolio::Error>(())
    /// ```
    pub fn raw_os_error(&self) -> Option<i32> {
        self.io_causes().find_map(io::Error::raw_os_error)
    }

    /// Returns the error number that a system call would fail with: [`Error::raw_os_error`] where
    /// the system caused the error, otherwise the number that fits best, such as `ENOMEM` for a
    /// full cache.
    pub fn errno(&self) -> i32 {
        self.raw_os_error().unwrap_or_else(|| self.own_number())
    }

    fn io_causes(&self) -> impl Iterator<Item = &io::Error> {
        let causes = iter::successors(self.source(), |error| (*error).source());
        causes.filter_map(|error| error.downcast_ref())
    }

    /// Returns the number of the C interface for an error that has none of the system: that of the
    /// nearest errno, by kind; EIO for what the storage did.
    fn own_number(&self) -> i32 {
        if let Some(errno) = self.0.errno {
            return errno;
        }
        match self.kind() {
            ErrorKind::Config
            | ErrorKind::Open
            | ErrorKind::NotRegular
            | ErrorKind::OutOfRange
            | ErrorKind::PinSpansFolios
            | ErrorKind::PastEnd => libc::EINVAL,
            ErrorKind::TooLong => libc::EFBIG,
            ErrorKind::NotOpenedFor | ErrorKind::Closed => libc::EBADF,
            ErrorKind::Unsupported | ErrorKind::CannotMap | ErrorKind::GateMisuse => {
                libc::EOPNOTSUPP
            }
            ErrorKind::MapsAlive
            | ErrorKind::OptionConflict
            | ErrorKind::TooManyPins
            | ErrorKind::Locked => libc::EBUSY,
            ErrorKind::Gated if self.0.cause.is_none() => libc::EBUSY,
            ErrorKind::PinnedByCaller => libc::EDEADLK,
            ErrorKind::WouldBlock | ErrorKind::Thread => libc::EAGAIN,
            ErrorKind::Full | ErrorKind::BoundInUse | ErrorKind::Memory => libc::ENOMEM,
            ErrorKind::Fault | ErrorKind::Close => self.cause().map_or(libc::EIO, Self::own_number),
            _ => libc::EIO,
        }
    }

    fn io_kind(&self) -> io::ErrorKind {
        if self.kind() == ErrorKind::Thread {
            // The system's EAGAIN, whose kind means that a retry may succeed at once.
            return io::ErrorKind::ResourceBusy;
        }
        let of_number = |number| io::Error::from_raw_os_error(number).kind();
        self.raw_os_error().map_or_else(|| self.own_io_kind(), of_number)
    }

    /// Returns the kind for `std::io` of an error without a number of the system.
    fn own_io_kind(&self) -> io::ErrorKind {
        match self.kind() {
            ErrorKind::PastEnd => io::ErrorKind::UnexpectedEof,
            ErrorKind::SwapCorrupt | ErrorKind::CorruptPage | ErrorKind::CutShort => {
                io::ErrorKind::InvalidData
            }
            ErrorKind::Full | ErrorKind::BoundInUse => io::ErrorKind::OutOfMemory,
            ErrorKind::Fault | ErrorKind::Close => {
                self.cause().map_or(io::ErrorKind::Other, Self::own_io_kind)
            }
            _ => match (self.io_causes().next(), self.own_number()) {
                (Some(cause), _) => cause.kind(),
                (None, libc::EOPNOTSUPP) => io::ErrorKind::Unsupported,
                (None, libc::EIO | libc::EBADF) => io::ErrorKind::Other,
                (None, number) => io::Error::from_raw_os_error(number).kind(),
            },
        }
    }
}

/// The error itself is inside, so that its text and [`Error::raw_os_error`] remain.
impl From<Error> for io::Error {
    #[cold]
    fn from(error: Error) -> Self {
        Self::new(error.io_kind(), error)
    }
}

/// Memory by what holds it, for the text of [`ErrorKind::Full`]. All in bytes.
pub(crate) struct Usage {
    pub(crate) bound: u64,
    /// Bytes of folios with a reference of a pin or a call in progress.
    pub(crate) pinned: u64,
    pub(crate) unwritten: u64,
    /// Bytes of folios of memory files without a swap.
    pub(crate) unswappable: u64,
    /// Bytes of folios that were locked or under I/O while the call waited.
    pub(crate) busy: u64,
    /// Dirty bytes that write gates hold back, also counted as in use or as unwritten.
    pub(crate) gated: u64,
    pub(crate) metadata: u64,
    /// Bytes that the program has reserved for itself.
    pub(crate) reserved: u64,
    /// Contiguous bytes that the call needs.
    pub(crate) wanted: u64,
    /// Free bytes, in pieces that are too small, or reserved for tables and for reading swapped
    /// pages.
    pub(crate) free: u64,
}

impl Error {
    #[cold]
    pub(crate) fn config(name: &str, problem: impl Display) -> Self {
        Self::new(ErrorKind::Config, format!("{name}: {problem}"))
    }

    pub(crate) fn memory(purpose: &str, source: io::Error) -> Self {
        Self::refused(ErrorKind::Memory, purpose, source)
    }

    pub(crate) fn thread(source: io::Error) -> Self {
        Self::refused(ErrorKind::Thread, "a thread", source)
    }

    /// Creates the error for something that the system refused, with the limit that is likely too
    /// low.
    #[cold]
    fn refused(kind: ErrorKind, what: &str, source: io::Error) -> Self {
        let remedy = match source.raw_os_error() {
            Some(libc::EAGAIN) => {
                "; RLIMIT_NPROC (ulimit -u), a control group's pids.max or, for the stack, \
                 RLIMIT_AS or vm.max_map_count is too low"
            }
            Some(libc::ENOMEM) => {
                "; RLIMIT_AS, RLIMIT_DATA, vm.overcommit_memory = 2 or vm.max_map_count may \
                 forbid it"
            }
            Some(libc::EINVAL) if kind == ErrorKind::Thread => {
                "; the thread-local storage of the program may exceed the stack of a thread"
            }
            _ => limit_of(&source),
        };
        let text = format!("the system refused {what}: {source}{remedy}");
        Self::new(kind, text).because(Arc::new(source))
    }

    #[cold]
    pub(crate) fn cannot_open(path: &Path, source: io::Error) -> Self {
        Self::new(ErrorKind::Open, format!("cannot open: {source}{}", limit_of(&source)))
            .in_file(path.display().to_string())
            .because(Arc::new(source))
    }

    /// Returns the error of a sync for a write-back that failed, before the call if `is_earlier`.
    #[cold]
    pub(crate) fn writeback(cause: Self, is_earlier: bool) -> Self {
        let which = if is_earlier { "an earlier write-back" } else { "the write-back" };
        Self::new(ErrorKind::Writeback, format!("{which} failed: {cause}")).because(Arc::new(cause))
    }

    /// Returns the error of a bound below the descriptors of pages.
    #[cold]
    pub(crate) fn below_descriptors(bound: u64, descriptors: u64) -> Self {
        let text = format!(
            "{descriptors} bytes are descriptors of pages that the cache had with a larger bound, \
             which are never freed; build another cache"
        );
        Self::new(ErrorKind::Full, text).of_bound(bound)
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
    pub(crate) fn behind_gate(file: String) -> Self {
        let text = "has a write gate: change it with LSNs, by its GatedFile, or by \
                    GatedFile::unlogged";
        Self::new(ErrorKind::GateMisuse, text).in_file(file)
    }

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

    #[cold]
    /// `failed` is the part of a sentence that says which call has failed.
    pub(crate) fn close(failed: &str, failures: &[Self]) -> Self {
        let listed = failures.iter().take(FAILURES_LISTED_MAX).map(ToString::to_string);
        let mut text = listed.collect::<Vec<_>>().join("; ");
        if let more @ 1.. = failures.len().saturating_sub(FAILURES_LISTED_MAX) {
            text += &format!("; and {more} more files");
        }
        Self::new(ErrorKind::Close, format!("{failed}: {text}"))
            .because(Arc::new(failures[0].clone()))
    }

    /// `refused` is the kernel's last refusal to evict pages of maps, if none was evicted since.
    #[cold]
    pub(crate) fn full(usage: &Usage, cause: Option<Self>, refused: Option<String>) -> Self {
        let Usage { bound, pinned, unwritten, unswappable, busy, gated, metadata, .. } = usage;
        let Usage { reserved, wanted, free, .. } = usage;
        let parts = [
            (pinned, "pinned"),
            (unwritten, "not written out, because that fails"),
            (unswappable, "in memory files without a swap"),
            (busy, "in use by other calls"),
            (gated, "held back by write gates"),
            (metadata, "descriptors and tables"),
            (reserved, "reserved by the program"),
        ];
        let held = parts.iter().filter(|(bytes, _)| **bytes > 0);
        let held: Vec<_> = held.map(|(bytes, what)| format!("{bytes} are {what}")).collect();
        let mut text = format!("the cache is full: of {bound} bytes, {}", held.join(", "));
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

pub(crate) fn of_range(range: &Range<u64>) -> String {
    format!("{} bytes at position {}", range.end - range.start, range.start)
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

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn no_space() -> Error {
        let source = io::Error::from_raw_os_error(libc::ENOSPC);
        io_error("data.db", "write of 4096 bytes at position 4096", Some(4096..8192), source)
    }

    #[test]
    fn number_file_and_range_are_found_behind_every_error() {
        let later = || Error::writeback(no_space(), true);
        let fault = Error::new(ErrorKind::Fault, "a page").because(Arc::new(later()));
        for error in
            [no_space(), later(), fault, Error::close("the cache was not closed", &[later()])]
        {
            assert_eq!(error.raw_os_error(), Some(libc::ENOSPC), "{error:?}");
            assert_eq!(error.errno(), libc::ENOSPC);
            assert_eq!((error.file(), error.range()), (Some("data.db"), Some(4096..8192)));
            assert_eq!(io::Error::from(error).kind(), io::ErrorKind::StorageFull);
        }
        let unwritable = Error::new(ErrorKind::Unwritable, "no").in_file("log").at(0..1);
        let unwritable = unwritable.because(Arc::new(no_space()));
        assert_eq!(unwritable.errno(), libc::ENOSPC);
        assert_eq!((unwritable.file(), unwritable.range()), (Some("log"), Some(0..1)));
    }

    #[test]
    fn an_error_of_the_cache_has_a_fitting_number() {
        let check = |error: Error, kind, number| {
            assert_eq!((error.raw_os_error(), error.errno()), (None, number), "{error:?}");
            assert_eq!(error.io_kind(), kind, "{error:?}");
        };
        let plain = |kind| Error::new(kind, "planted");
        check(plain(ErrorKind::Closed), io::ErrorKind::Other, libc::EBADF);
        check(plain(ErrorKind::TooLong), io::ErrorKind::FileTooLarge, libc::EFBIG);
        check(plain(ErrorKind::Config), io::ErrorKind::InvalidInput, libc::EINVAL);
        check(plain(ErrorKind::Unsupported), io::ErrorKind::Unsupported, libc::EOPNOTSUPP);
        check(plain(ErrorKind::OptionConflict), io::ErrorKind::ResourceBusy, libc::EBUSY);
        // A kind that no caller takes for a reason to try again at once.
        check(plain(ErrorKind::Locked), io::ErrorKind::ResourceBusy, libc::EBUSY);
        check(plain(ErrorKind::PinnedByCaller), io::ErrorKind::Deadlock, libc::EDEADLK);
        check(plain(ErrorKind::NotOpenedFor), io::ErrorKind::Other, libc::EBADF);
        let thread = Error::thread(io::Error::from_raw_os_error(libc::EAGAIN));
        assert_eq!(thread.io_kind(), io::ErrorKind::ResourceBusy);
        check(plain(ErrorKind::PastEnd), io::ErrorKind::UnexpectedEof, libc::EINVAL);
        check(Error::inside_gate("f".into()), io::ErrorKind::Deadlock, libc::EDEADLK);
        check(Error::not_mappable("f".into()), io::ErrorKind::InvalidInput, libc::EINVAL);
        let silent = || io_error("f", "sync", None, io::ErrorKind::TimedOut.into());
        check(silent(), io::ErrorKind::TimedOut, libc::EIO);
        check(Error::writeback(silent(), true), io::ErrorKind::TimedOut, libc::EIO);
        let full = plain(ErrorKind::Full).because(Arc::new(silent()));
        check(full, io::ErrorKind::OutOfMemory, libc::ENOMEM);
    }
}
