//! Conversion of an [`Error`] to an [`std::io::ErrorKind`] and an error number.
//!
//! For callers that speak `std::io`, C or FUSE. One table classifies every kind.

use super::{Error, ErrorKind};
use crate::io::OpenDiskError;
use std::error::Error as _;
use std::io;

impl Error {
    /// Returns the number of the system error that caused this error, if there is one: `ENOSPC` for
    /// a page that a full disk refused, also when a later sync or close reports it.
    ///
    /// ```
    /// # fn main() -> bifolio::Result<()> {
    /// use bifolio::{Cache, OpenOptions};
    /// let cache = Cache::builder().memory(1 << 20).build()?;
    /// let error = cache.open("/no/such/file", &OpenOptions::new()).unwrap_err();
    /// assert_eq!(error.raw_os_error(), Some(2));
    /// # Ok(())
    /// # }
    /// ```
    pub fn raw_os_error(&self) -> Option<i32> {
        if let ErrorKind::Close { failures } = self.kind() {
            return failures.iter().find_map(|failure| failure.cause.raw_os_error());
        }
        let mut next = self.source();
        while let Some(error) = next {
            if let Some(number) = error.downcast_ref().and_then(io::Error::raw_os_error) {
                return Some(number);
            }
            next = error.source();
        }
        None
    }

    /// Returns the error number that a system call would fail with: [`Error::raw_os_error`] where
    /// the system caused the error, otherwise the number that fits best, such as `ENOMEM` for a
    /// full cache.
    pub fn errno(&self) -> i32 {
        self.raw_os_error().unwrap_or_else(|| self.classify().1)
    }

    /// Returns the kind that this error has as an [`std::io::Error`].
    fn io_kind(&self) -> io::ErrorKind {
        self.raw_os_error()
            .map_or_else(|| self.classify().0, |number| io::Error::from_raw_os_error(number).kind())
    }

    /// Returns a copy of an [`ErrorKind::Full`], and `None` of any other error.
    pub(crate) fn full_again(&self) -> Option<Self> {
        let ErrorKind::Full {
            bound_bytes,
            pinned_bytes,
            unwritten_bytes,
            unswappable_bytes,
            busy_bytes,
            gated_bytes,
            metadata_bytes,
            wanted_bytes,
            free_bytes,
            ref cause,
            ref refused,
        } = *self.kind()
        else {
            return None;
        };
        let kind = ErrorKind::Full {
            bound_bytes,
            pinned_bytes,
            unwritten_bytes,
            unswappable_bytes,
            busy_bytes,
            gated_bytes,
            metadata_bytes,
            wanted_bytes,
            free_bytes,
            cause: cause.clone(),
            refused: refused.clone(),
        };
        Some(kind.into())
    }

    /// The kind and number of an error without a number of the system.
    fn classify(&self) -> (io::ErrorKind, i32) {
        use io::ErrorKind as Io;
        match self.kind() {
            ErrorKind::Config { .. }
            | ErrorKind::OutOfRange { .. }
            | ErrorKind::PinSpansFolios { .. }
            | ErrorKind::NotMappable { .. }
            | ErrorKind::FolioSizeConflict { .. } => (Io::InvalidInput, libc::EINVAL),
            ErrorKind::PastEnd { .. } => (Io::UnexpectedEof, libc::EINVAL),
            ErrorKind::TooLong { .. } => (Io::FileTooLarge, libc::EFBIG),
            ErrorKind::NotOpenedFor { .. } => (Io::PermissionDenied, libc::EBADF),
            ErrorKind::IsMappable { .. }
            | ErrorKind::CannotMap { .. }
            | ErrorKind::CannotGate { .. }
            | ErrorKind::CannotMapMut { .. } => (Io::Unsupported, libc::EOPNOTSUPP),
            ErrorKind::MapsAlive { .. }
            | ErrorKind::ImmutableConflict { .. }
            | ErrorKind::DirectConflict { .. }
            | ErrorKind::TooManyPins { .. } => (Io::ResourceBusy, libc::EBUSY),
            ErrorKind::Gated { cause: Some(cause), .. } => (cause.kind(), libc::EIO),
            ErrorKind::Gated { .. } => (Io::ResourceBusy, libc::EBUSY),
            ErrorKind::InsideGate { .. } => (Io::Deadlock, libc::EDEADLK),
            ErrorKind::Locked { .. } | ErrorKind::WouldBlock { .. } => {
                (Io::WouldBlock, libc::EAGAIN)
            }
            ErrorKind::Full { .. } | ErrorKind::BoundInUse { .. } => {
                (Io::OutOfMemory, libc::ENOMEM)
            }
            ErrorKind::SwapCorrupt { .. } | ErrorKind::CutShort { .. } => {
                (Io::InvalidData, libc::EIO)
            }
            ErrorKind::Open(error) => match error {
                OpenDiskError::DirectRefused { .. } => (Io::Unsupported, libc::EOPNOTSUPP),
                OpenDiskError::Replaced { .. } => (Io::ResourceBusy, libc::EBUSY),
                _ => (Io::InvalidInput, libc::EINVAL),
            },
            ErrorKind::Io(error) => (error.source.kind(), libc::EIO),
            ErrorKind::Writeback(error) => (error.source.kind(), libc::EIO),
            ErrorKind::Unwritable { cause, .. } => (cause.source.kind(), libc::EIO),
            ErrorKind::SwapRead { source, .. } => (source.source.kind(), libc::EIO),
            ErrorKind::CopyToFd { source, .. } => (source.kind(), libc::EIO),
            ErrorKind::Memory { source, .. } => (source.kind(), libc::ENOMEM),
            ErrorKind::Thread(source) => (source.kind(), libc::EAGAIN),
            ErrorKind::Fault(error) => error.classify(),
            ErrorKind::Close { failures } => {
                let first = failures.first().map(|failure| failure.cause.classify());
                first.unwrap_or((Io::Other, libc::EIO))
            }
            ErrorKind::Closed => (Io::Other, libc::EBADF),
            _ => (Io::Other, libc::EIO),
        }
    }
}

/// The error itself is inside, so that its text, with file and position, and
/// [`Error::raw_os_error`] remain:
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use bifolio::{Cache, OpenOptions};
/// let cache = Cache::builder().memory(1 << 20).build()?;
/// let error = cache.open("/no/such/file", &OpenOptions::new()).unwrap_err();
/// let error = std::io::Error::from(error);
/// assert_eq!(error.kind(), std::io::ErrorKind::NotFound);
/// let inner = error.get_ref().unwrap().downcast_ref::<bifolio::Error>().unwrap();
/// assert_eq!(inner.raw_os_error(), Some(2));
/// # Ok(())
/// # }
/// ```
impl From<Error> for io::Error {
    #[cold]
    fn from(error: Error) -> Self {
        Self::new(error.io_kind(), error)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::error::CloseFailure;
    use crate::io::{IoError, Operation};
    use std::sync::Arc;

    fn no_space() -> IoError {
        IoError {
            file: "data.db".into(),
            operation: Operation::Write,
            position_bytes: 4096,
            length_bytes: 4096,
            source: io::Error::from_raw_os_error(libc::ENOSPC),
        }
    }

    #[test]
    fn the_number_of_the_system_is_found_behind_every_error() {
        let cause = Arc::new(no_space());
        let later = || Error::from(ErrorKind::Writeback(Arc::new(no_space())));
        let failure = CloseFailure { file: "data.db".into(), unwritten_bytes: 1, cause: later() };
        let errors = [
            Error::from(no_space()),
            later(),
            ErrorKind::Fault(Arc::new(later())).into(),
            ErrorKind::Close { failures: vec![failure] }.into(),
            ErrorKind::Unwritable {
                file: "data.db".into(),
                position_bytes: 0,
                length_bytes: 1,
                dirty_bytes: 1,
                cause,
            }
            .into(),
        ];
        for error in errors {
            assert_eq!(error.raw_os_error(), Some(libc::ENOSPC), "{error:?}");
            assert_eq!(error.errno(), libc::ENOSPC);
            assert_eq!(io::Error::from(error).kind(), io::ErrorKind::StorageFull);
        }
    }

    #[test]
    fn an_error_of_the_cache_has_a_fitting_number() {
        let error = Error::from(ErrorKind::Closed);
        assert_eq!((error.raw_os_error(), error.errno()), (None, libc::EBADF));
        let file = String::from("data.db");
        let error = Error::from(ErrorKind::TooLong { file, wanted_bytes: 2, len_max_bytes: 1 });
        assert_eq!((error.io_kind(), error.errno()), (io::ErrorKind::FileTooLarge, libc::EFBIG));
    }
}
