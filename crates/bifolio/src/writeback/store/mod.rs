//! Where a file's bytes are while they are not in memory: on a backing, or nowhere.
//!
//! An [`Inode`](super::Inode) has one store. That of a file on a disk (`disk.rs`) has a backing,
//! whose bytes are those of the file wherever no folio is dirty. That of a memory file
//! (`memory.rs`) has none: a page without a folio is a hole, which reads as zeros, or stands in the
//! swap.

mod disk;
mod memory;

pub(super) use disk::DiskStore;
pub(super) use memory::MemoryStore;

/// See the head of the file.
#[derive(Debug)]
pub(super) enum Store {
    Disk(DiskStore),
    Memory(MemoryStore),
}
