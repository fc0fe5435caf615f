//! Errors of a request: the number that the program gets, and a line in the log.

use std::error::Error as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};
use std::{fmt, io};

use fuser::Errno;

/// The result type of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// Maximum number of failed requests that are logged in one second.
const LINES_PER_SECOND_MAX: u64 = 10;

/// The reason why a request failed.
#[derive(Debug)]
pub enum Error {
    /// A call of the system, on the source directory. The program gets the same number.
    System(rustix::io::Errno),
    /// The cache. Its text names the file.
    Cache(bifolio::Error),
    /// The file cannot be opened in the source directory.
    Open {
        /// The file.
        file: String,
        /// The error, which names a descriptor.
        source: bifolio::Error,
    },
    /// An earlier write-out or flush has failed, which the log has told about.
    Before {
        /// The file.
        file: String,
        /// Its error number.
        number: i32,
    },
    /// The device refused to flush the file.
    Flush {
        /// The file.
        file: String,
        /// The device's error.
        source: io::Error,
    },
}

impl Error {
    /// Returns the error number.
    pub fn number(&self) -> i32 {
        match self {
            Self::System(errno) => errno.raw_os_error(),
            Self::Cache(error) | Self::Open { source: error, .. } => error.errno(),
            Self::Before { number, .. } => *number,
            Self::Flush { source, .. } => source.raw_os_error().unwrap_or(libc::EIO),
        }
    }

    /// Returns `true` if closing descriptors may help.
    pub fn is_out_of_descriptors(&self) -> bool {
        matches!(self.number(), libc::EMFILE | libc::ENFILE | libc::ENOMEM)
    }

    /// Returns `true` if more free space may help.
    pub fn is_out_of_space(&self) -> bool {
        matches!(self.number(), libc::ENOSPC | libc::EDQUOT)
    }

    /// Returns the error number for the program. Logs errors of the device, which name the file.
    pub fn answer(&self) -> Errno {
        let number = self.number();
        let is_expected = matches!(self, Self::System(_) | Self::Before { .. })
            || matches!(number, libc::EFBIG | libc::EINVAL | libc::EACCES | libc::EPERM)
            || number == libc::EROFS;
        if !is_expected && may_log() {
            log::error!("{self}");
        }
        Errno::from_i32(number)
    }
}

/// Returns `false` if this second has had its lines: a program that retries must not fill a disk.
fn may_log() -> bool {
    /// The current second in the upper bits, the lines in the lower 16.
    static LINES: AtomicU64 = AtomicU64::new(0);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    // Relaxed: a line more or less in a second does no harm.
    let lines = LINES.load(Ordering::Relaxed);
    let lines = if lines >> 16 == now { lines + 1 } else { (now << 16) + 1 };
    LINES.store(lines, Ordering::Relaxed);
    lines & 0xffff <= LINES_PER_SECOND_MAX
}

impl fmt::Display for Error {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::System(errno) => errno.fmt(formatter),
            Self::Cache(error) => error.fmt(formatter),
            Self::Before { file, number } => {
                let cause = io::Error::from_raw_os_error(*number);
                write!(formatter, "{file}: an earlier write-out failed: {cause}")
            }
            // The error itself names a descriptor.
            Self::Open { file, source } => match source.source() {
                Some(cause) => write!(formatter, "{file}: cannot open: {cause}"),
                None => write!(formatter, "{file}: {source}"),
            },
            Self::Flush { file, source } => write!(formatter, "{file}: flush failed: {source}"),
        }
    }
}

impl From<rustix::io::Errno> for Error {
    fn from(errno: rustix::io::Errno) -> Self {
        Self::System(errno)
    }
}

impl From<bifolio::Error> for Error {
    fn from(error: bifolio::Error) -> Self {
        Self::Cache(error)
    }
}
