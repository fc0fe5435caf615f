//! Records of what is dirty: of one file its dirty list, epochs, LSNs, shared flushes, errors and
//! write gate; of all files the devices, the dirty limit and the calls of the flusher.
//!
//! Nothing here transfers a page, and nothing knows an inode: the files of a device have the type
//! `F`. Above, `inode` has the records of a file, and `writeback` writes out what they name.

mod device;
mod dirty;
mod errors;
mod flush;
mod flusher;
mod gate;
mod lsns;
mod throttle;

pub(crate) use device::{Device, Round};
pub(crate) use dirty::{DirtyFolios, DirtyList, InFlight, NotBegun, Walk};
pub(crate) use errors::{ErrorCursor, WriteErrors};
pub(crate) use flush::{Flushes, Wants};
pub(crate) use flusher::{DirtyLimits, Flusher, FlusherSettings, Roster, without_part_for_logs};
pub use gate::WriteGate;
pub(crate) use gate::{Ask, Gate, Opened, Refusal, is_inside, is_inside_any};
pub(crate) use lsns::{ChangeLsn, HeldBack, Lsns, NO_LSN, UNCOMMITTED, may_pass};
pub(crate) use throttle::{DirtyPages, part_of};
