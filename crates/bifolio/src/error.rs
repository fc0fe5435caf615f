//! Errors: what went wrong, with file, range and cause.
//!
//! A leaf open to all layers. [`Error`] is one word wide, so that returning the result of a read is
//! cheap. Its text is written where the error is made; `error/constructors.rs` makes those that
//! several places need.

mod constructors;
mod convert;

pub(crate) use constructors::{Usage, io_error, of_range, write_error};
use std::error::Error as StdError;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

/// The result type of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// An error of the cache. Formats as one line with what failed, where, and why.
///
/// A clone is the same error. The causes follow by [`source`](std::error::Error::source), down to
/// the [`std::io::Error`] of the system if there is one.
///
/// ```
/// # fn main() -> bifolio::Result<()> {
/// use bifolio::{Cache, ErrorKind};
/// let error = Cache::builder().memory(1).build().unwrap_err();
/// assert_eq!(error.kind(), ErrorKind::Config);
/// assert!(error.to_string().contains("memory"));
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Error(Arc<Inner>);

struct Inner {
    kind: ErrorKind,
    /// Number if the system has none and that of the kind does not fit.
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

    /// Sets the range of bytes.
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

    fn with(mut self, change: impl FnOnce(&mut Inner)) -> Self {
        let inner = Arc::get_mut(&mut self.0);
        debug_assert!(inner.is_some(), "an error changes only before it is shared");
        inner.map(change);
        self
    }

    /// Returns the kind of error.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// Returns the file as the cache names it: its path as it was given, or what
    /// [`Backing::describe`](crate::backing::Backing::describe) returned. If the error is about no
    /// file of its own, returns that of its cause; `None` if there is none either.
    pub fn file(&self) -> Option<&str> {
        self.0.file.as_deref().or_else(|| self.cause()?.file())
    }

    /// Returns the bytes of [`Self::file`] that the error is about: of the call, or the part of
    /// them that failed. `None` if it is about no range.
    ///
    /// ```
    /// # fn main() -> bifolio::Result<()> {
    /// use bifolio::{Cache, ErrorKind};
    /// let cache = Cache::builder().memory(1 << 20).build()?;
    /// let file = cache.memory_file("scratch")?;
    /// let error = file.pin(4096..4100).unwrap_err();
    /// assert_eq!((error.kind(), error.range()), (ErrorKind::PastEnd, Some(4096..4100)));
    /// # Ok(())
    /// # }
    /// ```
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
    /// The write gate of the file ([`GatedFile`](crate::GatedFile)) holds dirty pages back that
    /// this sync, or one that shared its flush, was to write: its call has failed, or a page is not
    /// committed. They stay dirty. All other pages are durable.
    Gated,
    /// The file cannot have a write gate, or its gate has used it and would wait for itself.
    GateMisuse,
    /// An earlier write-out failed. The next sync of each handle that was open then returns this
    /// error once. The pages stay dirty and are written again.
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
    /// The file would grow past its maximum length: that of its first open
    /// ([`OpenOptions::len_max`](crate::OpenOptions::len_max)), or as raised since
    /// ([`File::raise_len_max`](crate::File::raise_len_max)).
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
    /// A descriptor did not accept the bytes of a [`copy_to_fd`](crate::File::copy_to_fd).
    CopyToFd,
    /// Another program, or another cache, has locked the file
    /// ([`OpenOptions::exclusive`](crate::OpenOptions::exclusive)).
    Locked,
    /// The file is open in this cache, and an option of that open excludes one of this open.
    OptionConflict,
    /// The call needs a folio that its own thread has as a [`PageRefMut`](crate::PageRefMut): it
    /// would wait for itself. Drop the pin first.
    PinnedByCaller,
    /// The device of the file refuses writes, and the dirty limit is reached
    /// ([`CacheBuilder::dirty_max`](crate::CacheBuilder::dirty_max)), so a clean page
    /// cannot be modified. Nothing written earlier is lost. Pages that are dirty already can be
    /// modified, and all writes succeed again once the device accepts some pages.
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
    /// not build one either, because a table of waiting threads has entries of threads that do not
    /// exist in the child, unless the library was built with the feature `fork`. Let the child
    /// execute another program.
    Forked,
}
