//! Storage of a closed file, whose pages may still be in memory (`reclaim/closed_files.rs`).

use super::{Backing, IoBuf, IoBufMut};
use std::io;

/// Has the name of a closed file, for messages, and no descriptor. All transfers fail.
#[derive(Debug)]
pub(crate) struct ClosedStorage(pub(crate) String);

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

    fn sync_all(&self) -> io::Result<()> {
        is_closed()
    }

    fn len_bytes(&self) -> io::Result<u64> {
        is_closed()
    }

    fn set_len(&self, _length_bytes: u64) -> io::Result<()> {
        is_closed()
    }

    fn describe(&self) -> String {
        self.0.clone()
    }
}
