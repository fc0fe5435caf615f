//! Errors: those of the connection, and those that a call of the owner returned.

use std::fmt;
use std::io;

/// Result of a call of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// Kind of an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The owner has ended, or has ended the connection. Only what was synced is certain to be in
    /// the files. Connect again, or open the files with a cache of this process.
    OwnerGone,
    /// The connection belongs to the parent of this process. Connect again.
    Forked,
    /// The owner refused the connection: another user, another version, too many clients.
    Refused,
    /// The system refused something to this process: a descriptor, memory, a thread, a file.
    System,
    /// A call of the owner failed, with this kind of error.
    Call(bifolio::ErrorKind),
    /// An error of the owner of a kind that this version does not know.
    Unknown,
}

/// Error of a call. Boxed: so that the result of a hit is in registers.
#[derive(Clone, Debug)]
pub struct Error(Box<Inner>);

#[derive(Clone, Debug)]
struct Inner {
    kind: ErrorKind,
    errno: Option<i32>,
    text: String,
}

impl Error {
    pub(crate) fn new(kind: ErrorKind, text: impl Into<String>) -> Self {
        Self(Box::new(Inner { kind, errno: None, text: text.into() }))
    }

    /// Returns the error of a system call that this process made, for `what`.
    pub(crate) fn system(what: impl fmt::Display, source: impl Into<io::Error>) -> Self {
        let source = source.into();
        let text = format!("{what}: {source}");
        let (kind, errno) = (ErrorKind::System, source.raw_os_error());
        Self(Box::new(Inner { kind, errno, text }))
    }

    pub(crate) fn owner_gone() -> Self {
        let text = "the owner of the shared cache is gone: connect again, or open the file with a \
                    cache of this process; what was not synced may be lost";
        Self::new(ErrorKind::OwnerGone, text)
    }

    pub(crate) fn forked() -> Self {
        let text = "this connection belongs to the parent process: a forked child connects again";
        Self::new(ErrorKind::Forked, text)
    }

    /// Returns the kind.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// Returns the number of the system's error behind it, if there is one.
    pub fn raw_os_error(&self) -> Option<i32> {
        self.0.errno
    }
}

impl fmt::Display for Error {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0.text)
    }
}

impl std::error::Error for Error {}

impl From<Error> for io::Error {
    fn from(error: Error) -> Self {
        match error.kind() {
            ErrorKind::OwnerGone => Self::new(io::ErrorKind::NotConnected, error),
            ErrorKind::Call(bifolio::ErrorKind::PastEnd) => {
                Self::new(io::ErrorKind::UnexpectedEof, error)
            }
            _ => Self::other(error),
        }
    }
}

/// The kinds of errors in messages, by their place. New ones are added at the end.
const KINDS: [bifolio::ErrorKind; 35] = {
    use bifolio::ErrorKind::*;
    [
        Config,
        Open,
        NotRegular,
        Io,
        SwapFile,
        SwapRead,
        SwapCorrupt,
        CorruptPage,
        Gated,
        GateMisuse,
        Writeback,
        CutShort,
        WouldBlock,
        OutOfRange,
        PastEnd,
        TooLong,
        PinSpansFolios,
        NotOpenedFor,
        Unsupported,
        CannotMap,
        Fault,
        MapsAlive,
        Locked,
        OptionConflict,
        PinnedByCaller,
        Unwritable,
        Full,
        BoundInUse,
        TooManyPins,
        Memory,
        Thread,
        Close,
        Poisoned,
        Closed,
        Forked,
    ]
};

/// An error as it travels: two words and a text.
#[derive(Debug)]
pub(crate) struct Failure {
    /// One more than the place in [`KINDS`]; 0 for kinds that are not there.
    pub(crate) code: u64,
    /// Number of the system's error; 0 for none.
    pub(crate) errno: u64,
    pub(crate) text: String,
}

impl Failure {
    pub(crate) fn of(error: &bifolio::Error) -> Self {
        let place = KINDS.iter().position(|kind| *kind == error.kind());
        let errno = error.raw_os_error().and_then(|errno| u64::try_from(errno).ok());
        Self {
            code: place.map_or(0, |place| place as u64 + 1),
            errno: errno.unwrap_or(0),
            text: error.to_string(),
        }
    }

    /// Returns the failure of a request that no client makes which works as it should.
    pub(crate) fn invalid(text: impl Into<String>) -> Self {
        Self { code: 0, errno: 0, text: text.into() }
    }

    pub(crate) fn into_error(self) -> Error {
        let place = usize::try_from(self.code).ok().and_then(|code| code.checked_sub(1));
        let kind = place.and_then(|place| KINDS.get(place).copied());
        Error(Box::new(Inner {
            kind: kind.map_or(ErrorKind::Unknown, ErrorKind::Call),
            errno: i32::try_from(self.errno).ok().filter(|errno| *errno != 0),
            text: self.text,
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_of_the_owner_arrive_as_they_were() {
        let cache = bifolio::Cache::builder().memory(1 << 20).build().unwrap();
        let error = cache.open("/does/not/exist", &bifolio::OpenOptions::new()).unwrap_err();
        let arrived = Failure::of(&error).into_error();
        assert_eq!(arrived.kind(), ErrorKind::Call(bifolio::ErrorKind::Open));
        assert_eq!(arrived.to_string(), error.to_string());
        assert_eq!(arrived.raw_os_error(), error.raw_os_error());
        let garbage = Failure { code: u64::MAX, errno: u64::MAX, text: String::new() };
        assert_eq!(garbage.into_error().kind(), ErrorKind::Unknown);
    }
}
