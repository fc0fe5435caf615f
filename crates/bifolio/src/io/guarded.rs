//! A backing of a user's, none of whose panics gets out.
//!
//! Around every backing that is handed to the cache; everything is the backing's, but that a call
//! which panics is one that failed. The cache calls backings on threads that others need (the
//! flusher's, the engine's), with locks held and transfers in flight.

use std::io;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use super::{
    Alignment, Backing, DeviceIdentity, DirectStatus, FileIdentity, IoBuf, IoBufMut, IoError,
    IoRequest, Operation, Submission,
};

/// What a backing is called that cannot say it.
const NAMELESS: &str = "a backing";

/// See the head of the file.
#[derive(Debug)]
pub(crate) struct Guarded {
    backing: Arc<dyn Backing>,
    /// Asked once: a transfer relies on it, and it never changes.
    alignment: Alignment,
    identity: Option<FileIdentity>,
    device: Option<DeviceIdentity>,
}

impl Guarded {
    /// Asks the backing what never changes.
    ///
    /// # Errors
    /// That panics.
    pub(crate) fn new(backing: Arc<dyn Backing>) -> Result<Self, IoError> {
        let asked = guard(|| Ok((backing.alignment(), backing.identity(), backing.device())));
        match asked {
            Ok((alignment, identity, device)) => Ok(Self { backing, alignment, identity, device }),
            Err(source) => Err(IoError {
                file: NAMELESS.to_owned(),
                operation: Operation::Len,
                position_bytes: 0,
                length_bytes: 0,
                source,
            }),
        }
    }
}

/// What a call answers; an error, if it panics. What it leaves behind is the backing's affair.
fn guard<T>(call: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    let panicked = |_| Err(io::Error::other("the backing panicked"));
    catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(panicked)
}

impl Backing for Guarded {
    fn read_at(&self, target: &mut IoBufMut<'_>, position_bytes: u64) -> io::Result<usize> {
        guard(|| self.backing.read_at(target, position_bytes))
    }

    fn write_at(&self, source: &IoBuf<'_>, position_bytes: u64) -> io::Result<usize> {
        guard(|| self.backing.write_at(source, position_bytes))
    }

    fn read_vectored_at(
        &self,
        targets: &mut [IoBufMut<'_>],
        position_bytes: u64,
    ) -> io::Result<usize> {
        guard(|| self.backing.read_vectored_at(targets, position_bytes))
    }

    fn write_vectored_at(&self, sources: &[IoBuf<'_>], position_bytes: u64) -> io::Result<usize> {
        guard(|| self.backing.write_vectored_at(sources, position_bytes))
    }

    fn submission(&self, request: &IoRequest) -> Option<Submission<'_>> {
        guard(|| Ok(self.backing.submission(request))).ok().flatten()
    }

    fn completed(&self, request: &IoRequest, answer: io::Result<usize>) -> io::Result<usize> {
        guard(|| self.backing.completed(request, answer))
    }

    fn sync_data(&self) -> io::Result<()> {
        guard(|| self.backing.sync_data())
    }

    fn sync_all(&self) -> io::Result<()> {
        guard(|| self.backing.sync_all())
    }

    fn len_bytes(&self) -> io::Result<u64> {
        guard(|| self.backing.len_bytes())
    }

    fn set_len(&self, length_bytes: u64) -> io::Result<()> {
        guard(|| self.backing.set_len(length_bytes))
    }

    fn allocate(&self, bytes: Range<u64>) -> io::Result<()> {
        guard(|| self.backing.allocate(bytes))
    }

    fn alignment(&self) -> Alignment {
        self.alignment
    }

    fn describe(&self) -> String {
        guard(|| Ok(self.backing.describe())).unwrap_or_else(|_| NAMELESS.to_owned())
    }

    fn identity(&self) -> Option<FileIdentity> {
        self.identity
    }

    fn device(&self) -> Option<DeviceIdentity> {
        self.device
    }

    fn direct(&self) -> DirectStatus {
        guard(|| Ok(self.backing.direct())).unwrap_or(DirectStatus::Custom)
    }
}
