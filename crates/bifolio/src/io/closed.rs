//! Storage of a closed file whose pages are kept in memory (`keep`).

use super::{Backing, DirectBacking, FileIdentity, IoBuf, IoBufMut};
use std::io;

/// Has the name and the identity of a closed file, and no descriptor. All transfers fail.
#[derive(Debug)]
pub(crate) struct ClosedStorage {
    pub(crate) name: String,
    pub(crate) identity: Option<FileIdentity>,
}

fn is_closed<T>() -> io::Result<T> {
    Err(io::Error::other("the file is closed"))
}

impl Backing for ClosedStorage {
    fn read_at(&self, _target: &mut IoBufMut<'_>, _position_bytes: u64) -> io::Result<usize> {
        is_closed()
    }

    fn write_at(&self, _source: &IoBuf<'_>, _position_bytes: u64) -> io::Result<usize> {
        is_closed()
    }

    fn sync_data(&self) -> io::Result<()> {
        is_closed()
    }

    fn len_bytes(&self) -> io::Result<u64> {
        is_closed()
    }

    fn set_len(&self, _length_bytes: u64) -> io::Result<()> {
        is_closed()
    }

    fn describe(&self) -> String {
        self.name.clone()
    }

    fn as_direct(&self) -> Option<&dyn DirectBacking> {
        Some(self)
    }
}

impl DirectBacking for ClosedStorage {
    fn identity(&self) -> Option<FileIdentity> {
        self.identity
    }
}
