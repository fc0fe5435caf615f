//! Transfers between frames and storage: the [`Backing`] trait and what is built on it.
//!
//! Stands under `writeback`, `reclaim` and `file`, which move whole folios; calls `sys`.
//!
//! ```text
//!   Engine, Queue                            many transfers at once, their owners      engine/
//!     |
//!   read_full / write_full / sync_data ...   continue short transfers, EINTR, EAGAIN   transfer.rs
//!     |                                      what failed, where, how much was left     error.rs
//!   trait Backing                            one attempt each
//!     |                                      what is asked of it, where it may go      request.rs
//!     |-- Guarded                            around yours: panics are errors         guarded.rs
//!     |-- DiskFile                           O_DIRECT, the unaligned tail, fallbacks   disk.rs
//!     |                                      which of the two ways a file goes         direct.rs
//!     |                                      which file a path names                   located.rs
//!     '-- yours                              object stores, tests, faults
//!   IoBufMut / IoBuf                      memory that others may touch meanwhile    buf.rs
//!   Span                                     an address and a length                   span.rs
//!   IoBuffer                                 memory to drive a backing by hand         buffer.rs
//!   Alignment, rounding                      arithmetic                                align.rs
//! ```
//!
//! Nothing here knows folios, dirty pages or retries of a failed write: an error goes up, whole.

mod align;
mod buf;
mod buffer;
mod direct;
mod disk;
mod engine;
mod error;
mod guarded;
mod located;
mod request;
mod span;
#[cfg(test)]
mod tests;
mod transfer;

use std::fmt::Debug;
use std::io;
use std::ops::Range;
use std::os::fd::AsFd;

pub use align::{Alignment, PositionOutOfRange};
pub use buf::{IoBuf, IoBufMut};
pub use buffer::IoBuffer;
pub use disk::{DirectIo, DiskFile, DiskOptions};
pub(crate) use engine::{Engine, Pieces, Queue, RUN_PAGES_MAX, Transfer};
pub use error::{IoError, OpenDiskError, Operation};
pub(crate) use guarded::Guarded;
pub(crate) use located::Located;
pub use request::{IoRequest, Submission};
pub(crate) use transfer::{
    allocate, len_bytes, read_full, set_len, sync_all, sync_data, write_full,
};

pub use crate::sys::file::FileKind;

/// Storage a cache can stand on: numbered bytes that can be read, written, synced and cut.
///
/// [`DiskFile`] is the one that comes with the crate. Implement it for storage of your own and
/// hand it to `Cache::open_backing`.
///
/// # What the cache promises
/// - Memory and positions of a transfer are multiples of [`alignment`](Self::alignment). Lengths
///   are too, but for the last write before the end of the file: it ends where the file ends.
/// - Two writes of the same bytes never overlap in time; reads and writes of different bytes may,
///   from several threads.
/// - [`set_len`](Self::set_len) overlaps no write, and no other `set_len`.
/// - The bytes of an [`IoBuf`] do not change during a write, nor until it has ended: what was
///   written of a folio is one state of it.
///
/// # What a backing promises
/// - One call is one attempt. It may transfer fewer bytes than asked: the cache continues. It may
///   fail with [`Interrupted`](io::ErrorKind::Interrupted) or
///   [`WouldBlock`](io::ErrorKind::WouldBlock): the cache tries again, the latter a bounded number
///   of times. Every other error goes to the caller as it is.
/// - The storage never gets longer than the end of the last byte written, or what
///   [`set_len`](Self::set_len) or [`allocate`](Self::allocate) said. Bytes between an old end and
///   a later write are zeros.
/// - A read sees every write that returned before it began.
/// - It does not call back into the cache.
/// - It does not panic. A call that does is one that failed.
pub trait Backing: Send + Sync + Debug {
    /// Reads into `target` from `position_bytes` on. Returns how many bytes it filled, from the
    /// first on; 0 only at or behind the end. Bytes of `target` after those may hold anything.
    fn read_at(&self, target: &mut IoBufMut<'_>, position_bytes: u64) -> io::Result<usize>;

    /// Writes `source` at `position_bytes`. Returns how many bytes it took, from the first on.
    fn write_at(&self, source: &IoBuf<'_>, position_bytes: u64) -> io::Result<usize>;

    /// As [`read_at`](Self::read_at), into several buffers, one behind the other. Only the last of
    /// them may be shorter than a multiple of [`alignment`](Self::alignment). A backing that does
    /// not implement it fills the first one.
    fn read_vectored_at(
        &self,
        targets: &mut [IoBufMut<'_>],
        position_bytes: u64,
    ) -> io::Result<usize> {
        match targets.iter_mut().find(|target| !target.is_empty()) {
            Some(first) => self.read_at(first, position_bytes),
            None => Ok(0),
        }
    }

    /// As [`write_at`](Self::write_at), from several buffers, one behind the other. Only the last
    /// of them may be shorter than a multiple of [`alignment`](Self::alignment). A backing that
    /// does not implement it stores the first one.
    fn write_vectored_at(&self, sources: &[IoBuf<'_>], position_bytes: u64) -> io::Result<usize> {
        match sources.iter().find(|source| !source.is_empty()) {
            Some(first) => self.write_at(first, position_bytes),
            None => Ok(0),
        }
    }

    /// Where the cache may make such a transfer by itself, without calling the backing: it hands
    /// the kernel many at a time (io_uring). `None`: it calls `*_at` from a thread, one a transfer.
    ///
    /// The cache may still make any transfer with `*_at` instead, whatever this says.
    fn submission(&self, request: &IoRequest) -> Option<Submission<'_>> {
        let _ = request;
        None
    }

    /// Sees what the kernel answered to a transfer made by [`submission`](Self::submission), and
    /// says what the cache is to take it for. Called once a transfer, by the thread that waits for
    /// it. [`Interrupted`](io::ErrorKind::Interrupted): the cache tries again with `*_at`.
    fn completed(&self, request: &IoRequest, answer: io::Result<usize>) -> io::Result<usize> {
        let _ = request;
        answer
    }

    /// Makes every write and [`set_len`](Self::set_len) that returned before durable.
    ///
    /// After an error it must not return `Ok` before that is true: not because a second try found
    /// nothing left to write.
    fn sync_data(&self) -> io::Result<()>;

    /// As [`sync_data`](Self::sync_data), and what is known about the file (times, owner) too.
    fn sync_all(&self) -> io::Result<()>;

    /// How many bytes there are.
    fn len_bytes(&self) -> io::Result<u64>;

    /// Cuts the storage to `length_bytes`, or lets it grow to that by zeros.
    fn set_len(&self, length_bytes: u64) -> io::Result<()>;

    /// Sets storage aside for bytes that will be written, and which are zeros until then: writing
    /// them neither has to look for room nor makes the storage longer. It is longer after this
    /// call, if it was shorter. What was written there stays.
    ///
    /// The cache asks for its own swap file only, and goes on whatever the answer is. A backing
    /// that does not implement it does nothing.
    fn allocate(&self, bytes: Range<u64>) -> io::Result<()> {
        let _ = bytes;
        Ok(())
    }

    /// What memory, positions and lengths must be multiples of. Never changes.
    fn alignment(&self) -> Alignment {
        Alignment::NONE
    }

    /// A path or a name, for messages.
    fn describe(&self) -> String;

    /// What tells this file from others, so that a file opened twice has one cache: `None` if
    /// every open is a file of its own.
    fn identity(&self) -> Option<FileIdentity> {
        None
    }

    /// What it stands on: files that say the same share a flusher and a part of what may be
    /// dirty, and may hold each other up when the storage is full, slow, or does not answer. Files
    /// of different devices do not. By default the device of [`identity`](Self::identity); `None`
    /// is a device of its own. Never changes.
    fn device(&self) -> Option<DeviceIdentity> {
        self.identity().map(FileIdentity::device)
    }

    /// Whether transfers reach the device directly, for the statistics. May change while open.
    fn direct(&self) -> DirectStatus {
        DirectStatus::Custom
    }
}

/// Which device it is: what files share that may hold each other up.
///
/// A file system of the kernel is known by its number, anything else by one of your own. The two
/// never meet: a number of your own is equal to no file system's, whatever it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DeviceIdentity {
    is_custom: bool,
    number: u64,
}

impl DeviceIdentity {
    /// A device of your own: the same number is the same device.
    pub const fn custom(number: u64) -> Self {
        Self { is_custom: true, number }
    }

    /// The file system an open file is on, for a backing that stands on it.
    ///
    /// # Errors
    /// What `fstat` says.
    pub fn of_file(file: impl AsFd) -> io::Result<Self> {
        FileIdentity::of_file(file).map(FileIdentity::device)
    }

    /// The number of the file system (`st_dev`), or your own.
    pub const fn number(self) -> u64 {
        self.number
    }
}

/// Which file it is, for as long as it is open somewhere.
///
/// A file of the kernel is known by device and inode, anything else by numbers of your own. The
/// two never meet: numbers of your own are equal to no file's, whatever they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FileIdentity {
    device: DeviceIdentity,
    inode: u64,
}

impl FileIdentity {
    /// An identity of your own: the same numbers are the same file. The first is that of its
    /// [device](DeviceIdentity::custom).
    pub const fn custom(device: u64, inode: u64) -> Self {
        Self { device: DeviceIdentity::custom(device), inode }
    }

    /// The identity of an open file, for a backing that stands for that very file: whoever opens
    /// its path in the cache shares its pages.
    ///
    /// # Errors
    /// What `fstat` says.
    pub fn of_file(file: impl AsFd) -> io::Result<Self> {
        Ok(Self::of(crate::sys::file::status(file.as_fd())?))
    }

    pub(crate) fn of(status: crate::sys::file::Status) -> Self {
        let device = DeviceIdentity { is_custom: false, number: status.device };
        Self { device, inode: status.inode }
    }

    /// What it is on: a file system, or a device of your own.
    pub const fn device(self) -> DeviceIdentity {
        self.device
    }

    /// The file in it (`st_ino`), or the second number of your own.
    pub const fn inode(self) -> u64 {
        self.inode
    }
}

/// How the transfers of a file reach its storage.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DirectStatus {
    /// Between frames and device, past the kernel's page cache (`O_DIRECT`).
    Direct,
    /// Through the kernel's page cache.
    Buffered {
        /// Why not directly.
        reason: String,
    },
    /// The storage is not a file of the kernel.
    Custom,
}
