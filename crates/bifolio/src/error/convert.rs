//! Conversion of an [`Error`] to an [`std::io::ErrorKind`] and an error number.
//!
//! For callers that speak `std::io`, C or FUSE. One table has the number of every kind.

use super::{Error, ErrorKind};
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
        self.io_causes().find_map(io::Error::raw_os_error)
    }

    /// Returns the error number that a system call would fail with: [`Error::raw_os_error`] where
    /// the system caused the error, otherwise the number that fits best, such as `ENOMEM` for a
    /// full cache.
    pub fn errno(&self) -> i32 {
        self.raw_os_error().unwrap_or_else(|| self.own_number())
    }

    /// Iterates over the causes of `std::io`.
    fn io_causes(&self) -> impl Iterator<Item = &io::Error> {
        let causes = std::iter::successors(self.source(), |error| (*error).source());
        causes.filter_map(|error| error.downcast_ref())
    }

    /// Returns the number of an error without one of the system.
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
            ErrorKind::MapsAlive | ErrorKind::OptionConflict | ErrorKind::TooManyPins => {
                libc::EBUSY
            }
            ErrorKind::Gated if self.0.cause.is_none() => libc::EBUSY,
            ErrorKind::Locked | ErrorKind::WouldBlock | ErrorKind::Thread => libc::EAGAIN,
            ErrorKind::Full | ErrorKind::BoundInUse | ErrorKind::Memory => libc::ENOMEM,
            ErrorKind::Fault | ErrorKind::Close => self.cause().map_or(libc::EIO, Self::own_number),
            _ => libc::EIO,
        }
    }

    /// Returns the kind that this error has as an [`std::io::Error`].
    fn io_kind(&self) -> io::ErrorKind {
        let number = self.raw_os_error();
        let of_number = |number| io::Error::from_raw_os_error(number).kind();
        number.map_or_else(|| self.own_io_kind(), of_number)
    }

    /// Returns the kind of an error without a number of the system.
    fn own_io_kind(&self) -> io::ErrorKind {
        match self.kind() {
            ErrorKind::PastEnd => io::ErrorKind::UnexpectedEof,
            ErrorKind::NotOpenedFor => io::ErrorKind::PermissionDenied,
            ErrorKind::SwapCorrupt | ErrorKind::CutShort => io::ErrorKind::InvalidData,
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
    use crate::error::io_error;
    use std::sync::Arc;

    fn no_space() -> Error {
        let source = io::Error::from_raw_os_error(libc::ENOSPC);
        io_error("data.db", "write of 4096 bytes at position 4096", Some(4096..8192), source)
    }

    #[test]
    fn number_file_and_range_are_found_behind_every_error() {
        let later = || Error::writeback(no_space());
        let fault = Error::new(ErrorKind::Fault, "a page").because(Arc::new(later()));
        for error in [no_space(), later(), fault, Error::close(&[later()])] {
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
        check(plain(ErrorKind::Locked), io::ErrorKind::WouldBlock, libc::EAGAIN);
        check(plain(ErrorKind::PastEnd), io::ErrorKind::UnexpectedEof, libc::EINVAL);
        check(Error::inside_gate("f".into()), io::ErrorKind::Deadlock, libc::EDEADLK);
        check(Error::not_mappable("f".into()), io::ErrorKind::InvalidInput, libc::EINVAL);
        let silent = || io_error("f", "sync", None, io::ErrorKind::TimedOut.into());
        check(silent(), io::ErrorKind::TimedOut, libc::EIO);
        check(Error::writeback(silent()), io::ErrorKind::TimedOut, libc::EIO);
        let full = plain(ErrorKind::Full).because(Arc::new(silent()));
        check(full, io::ErrorKind::OutOfMemory, libc::ENOMEM);
    }
}
