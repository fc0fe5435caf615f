//! One cache for many processes: where in shared memory a file's words are, for its owner; and the
//! hits of another process over them.
//!
//! ```text
//!   mod.rs     the owner's side: places of frames, tables and lengths; uses that clients report
//!   window.rs  the client's side: memory mapped for reading, hits
//!   area.rs    memory that both sides write, for requests
//! ```
//!
//! Called by `crates/bifolio-share`, which has what is between the processes: the socket, the
//! requests, the life of either side. Here is only what must know how a page is found. A client
//! never writes to this memory, so it can harm no other process by it.

mod area;
mod window;

pub use area::SharedArea;
pub use window::{FileWindow, Window};

use crate::error::{Error, Result};
use crate::file::{File, PageView};
use crate::memory::Memory;
use crate::page::PAGE_BYTES;
use std::os::fd::OwnedFd;

/// Shared memory of a cache, for a [`Window`] in another process.
#[derive(Debug)]
pub struct FramePlace {
    /// Descriptor of the memory, for reading only.
    pub memory: OwnedFd,
    /// Offset of the frames in it, bytes.
    pub offset_bytes: u64,
    /// Length of the frames, resident or not.
    pub length_bytes: u64,
}

impl FramePlace {
    pub(crate) fn of(memory: &Memory) -> Result<Self> {
        let place = memory
            .arena
            .shared_place()
            .ok_or_else(|| Error::config("shared", "the cache was not built with shared memory"))?;
        let (shared, offset_bytes) = place;
        let reader = shared.reader();
        let memory_of = |reader| Self {
            memory: reader,
            offset_bytes,
            length_bytes: u64::from(memory.arena.frames()) * PAGE_BYTES,
        };
        reader.map(memory_of).map_err(|error| Error::memory("a descriptor of its memory", error))
    }
}

/// Places of a file's words in shared memory, for a [`FileWindow`] in another process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FilePlace {
    /// Offset of the page with the file's length, bytes.
    pub hot_offset: u64,
    /// Offset of the file's Entries, bytes.
    pub entries_offset: u64,
    /// Number of Entries. Pages after them have Entries elsewhere, and are no hits of others.
    pub entries: u64,
}

impl File {
    /// Returns the places of the file's words. They keep their meaning as long as the handle, or
    /// another of the file, is open; afterwards they have no Entry of any file. `None` if the
    /// cache has private memory, if the file can be mapped, or if it is not open for reading.
    #[doc(hidden)]
    pub fn shared_place(&self) -> Option<FilePlace> {
        let inode = &self.handle.inode;
        if inode.page_space.is_in_place() || self.handle.check_readable().is_err() {
            return None;
        }
        let (hot_offset, entries_offset) = inode.mapping.shared_offsets()?;
        let entries = inode.mapping.table().first_end_bytes() / PAGE_BYTES;
        Some(FilePlace { hot_offset, entries_offset, entries })
    }

    /// Returns the offset of pinned bytes of this file in the frames; `None` if they are elsewhere.
    #[doc(hidden)]
    pub fn shared_offset_of(&self, pinned: &PageView<'_>) -> Option<u64> {
        let arena = &self.handle.inode.memory.arena;
        arena.shared_place()?;
        let offset_bytes = pinned.as_ptr().addr().checked_sub(arena.base().addr())? as u64;
        (offset_bytes < u64::from(arena.frames()) * PAGE_BYTES).then_some(offset_bytes)
    }

    /// Marks a page as used that another process has read. A page that does not exist is ignored.
    #[doc(hidden)]
    pub fn note_used(&self, page: u64) {
        let inode = &self.handle.inode;
        if page < inode.mapping.table().first_end_bytes() / PAGE_BYTES {
            inode.mapping.note_use(&inode.memory.folios, page, false, || true);
        }
    }
}
