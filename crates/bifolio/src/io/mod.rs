//! Transfers between frames and storage: the [`Backing`] trait and what is built on it.
//!
//! ```text
//!   Engine, Queue                            many transfers at once, their owners      engine/
//!     |
//!   Transfer, read_full, sync_data ...       continue short transfers, EINTR, EAGAIN   transfer.rs
//!     |                                      what failed, where, how much was left
//!   trait Backing                            one attempt each                          backing.rs
//!     |-- Guarded                            around a user's: panics become errors
//!     |-- DiskFile                           O_DIRECT, the unaligned tail, fallbacks   disk.rs
//!     |                                      its opening: direct or buffered        open_disk.rs
//!     '-- a user's                           object stores, tests, fault injection
//!   IoRequest, IoBufMut / IoBuf              memory that other threads may access      request.rs
//!   Load                                     what a device has in progress             load.rs
//! ```
//!
//! This module knows no folios, and does not retry a failed write: an error is returned as it is.

mod backing;
mod closed;
mod disk;
mod engine;
mod load;
mod open_disk;
mod request;
#[cfg(test)]
mod tests;
mod transfer;

pub use backing::{Backing, DirectBacking, DirectStatus, FallocateMode, FileIdentity};
pub(crate) use backing::{DeviceIdentity, Guarded};
pub(crate) use closed::ClosedStorage;
pub use disk::DiskFile;
pub(crate) use engine::{Engine, Lane, Queue, Urgency, lane_of};
pub(crate) use load::{Load, Loads};
pub use open_disk::DirectIo;
pub(crate) use open_disk::DiskOptions;
pub(crate) use open_disk::{Located, replaced};
pub(crate) use request::POSITION_BYTES_MAX;
pub use request::{Alignment, IoBuf, IoBufMut, IoBuffer, IoRequest, Operation, Submission};
pub(crate) use transfer::{
    Pieces, RUN_PAGES_MAX, Transfer, fallocate, len_bytes, seek_data, seek_hole, set_len, sync_all,
    sync_data,
};
