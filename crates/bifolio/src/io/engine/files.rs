//! A backing that has a slot among the registered files.
//!
//! Made by [`Engine::register`](super::Engine::register) around a backing that is opened;
//! everything but the slot is the backing's. The slot is the same in every ring; a ring registers
//! the descriptor it is first given. When the backing goes, every ring lets its file go first:
//! otherwise a closed file would stay open, and the next file with this slot might be taken for it.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use super::rings::Rings;
use crate::io::{
    Alignment, Backing, DeviceIdentity, DirectStatus, FileIdentity, IoBuf, IoBufMut, IoRequest,
    Submission,
};

/// See the head of the file.
#[derive(Debug)]
pub(super) struct RegisteredFile {
    backing: Arc<dyn Backing>,
    slot: u32,
    rings: Arc<Rings>,
}

impl RegisteredFile {
    pub(super) fn new(backing: Arc<dyn Backing>, slot: u32, rings: Arc<Rings>) -> Self {
        Self { backing, slot, rings }
    }
}

impl Drop for RegisteredFile {
    fn drop(&mut self) {
        self.rings.free_slot(self.slot);
    }
}

impl Backing for RegisteredFile {
    fn submission(&self, request: &IoRequest) -> Option<Submission<'_>> {
        let submission = self.backing.submission(request)?;
        Some(Submission { slot: Some(self.slot), ..submission })
    }

    fn completed(&self, request: &IoRequest, answer: io::Result<usize>) -> io::Result<usize> {
        self.backing.completed(request, answer)
    }

    fn read_at(&self, target: &mut IoBufMut<'_>, position_bytes: u64) -> io::Result<usize> {
        self.backing.read_at(target, position_bytes)
    }

    fn write_at(&self, source: &IoBuf<'_>, position_bytes: u64) -> io::Result<usize> {
        self.backing.write_at(source, position_bytes)
    }

    fn read_vectored_at(
        &self,
        targets: &mut [IoBufMut<'_>],
        position_bytes: u64,
    ) -> io::Result<usize> {
        self.backing.read_vectored_at(targets, position_bytes)
    }

    fn write_vectored_at(&self, sources: &[IoBuf<'_>], position_bytes: u64) -> io::Result<usize> {
        self.backing.write_vectored_at(sources, position_bytes)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.backing.sync_data()
    }

    fn sync_all(&self) -> io::Result<()> {
        self.backing.sync_all()
    }

    fn len_bytes(&self) -> io::Result<u64> {
        self.backing.len_bytes()
    }

    fn set_len(&self, length_bytes: u64) -> io::Result<()> {
        self.backing.set_len(length_bytes)
    }

    fn allocate(&self, bytes: Range<u64>) -> io::Result<()> {
        self.backing.allocate(bytes)
    }

    fn alignment(&self) -> Alignment {
        self.backing.alignment()
    }

    fn describe(&self) -> String {
        self.backing.describe()
    }

    fn identity(&self) -> Option<FileIdentity> {
        self.backing.identity()
    }

    fn device(&self) -> Option<DeviceIdentity> {
        self.backing.device()
    }

    fn direct(&self) -> DirectStatus {
        self.backing.direct()
    }
}
