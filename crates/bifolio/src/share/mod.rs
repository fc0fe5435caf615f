//! One cache for many processes: where in shared memory a file's words are, for its owner; and the
//! hits of another process over them.
//!
//! ```text
//!   mod.rs     the owner's side: places of frames, tables and lengths; uses that clients report
//!   window.rs  the client's side: memory mapped for reading, hits
//!   area.rs    memory that both sides write, for requests
//!   slot.rs    the word of a request in it
//! ```
//!
//! Called by `crates/bifolio-share`, which has what is between the processes: the socket, the
//! requests, the life of either side. Here is only what must know how a page is found. A client
//! never writes to this memory, so it can harm no other process by it.

mod area;
mod slot;
mod window;

pub use area::SharedArea;
pub use slot::{Gone, SlotWord, Wait};
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

    /// Records that another process has read a page without a mark of use. A page that does not
    /// exist is ignored.
    #[doc(hidden)]
    pub fn note_used(&self, page: u64) {
        if page < self.handle.inode.mapping.table().first_end_bytes() / PAGE_BYTES {
            self.note_hit_elsewhere(page);
        }
    }

    /// Reads like [`File::read_at`] for another process, whose hits on the way to `position` may
    /// not be recorded yet: readahead that they have reached goes on.
    ///
    /// # Errors
    /// As [`File::read_at`].
    #[doc(hidden)]
    pub fn read_for_client(&self, buffer: &mut [u8], position: u64) -> Result<usize> {
        self.handle.follow_passed_marks(position / PAGE_BYTES);
        self.read_at(buffer, position)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::Cache;
    use crate::file::OpenOptions;

    const MIB: u64 = 1 << 20;

    /// Frames, tables and lengths of all files: what the bound counts, and a page for each length.
    #[test]
    fn resident_memory_is_within_the_bound() {
        let directory = tempfile::tempdir().unwrap();
        let cache = Cache::builder().memory(2 * MIB).shared(true).build().unwrap();
        let open = |name: &str| {
            let path = directory.path().join(name);
            std::fs::File::create(&path).unwrap().set_len(64 * MIB).unwrap();
            cache.open(&path, &OpenOptions::new().write(true)).unwrap()
        };
        let files: Vec<_> = (0..10).map(|number| open(&number.to_string())).collect();
        let memory = std::sync::Arc::clone(&files[0].handle.inode.memory);
        let resident = |bound: u64| {
            let (shared, _) = memory.arena.shared_place().unwrap();
            let resident = shared.resident_bytes().unwrap();
            let used = cache.stats().memory.used_bytes;
            assert!(used <= bound, "{used} of {bound}");
            assert!(resident <= used + 10 * PAGE_BYTES, "{resident} resident of {used}");
            resident
        };
        let mut random = fastrand::Rng::with_seed(1);
        let mut touch_all = || {
            for _ in 0..2000 {
                let (file, position) = (&files[random.usize(..10)], random.u64(..64 * MIB - 8));
                file.read_exact_at(&mut [0; 8], position).unwrap();
                if random.u32(..8) == 0 {
                    file.write_all_at(&[1; 8], position).unwrap();
                }
            }
        };
        touch_all();
        assert!(resident(2 * MIB) > MIB);
        cache.set_memory(MIB / 2).unwrap();
        touch_all();
        resident(MIB / 2);
        let place = cache.shared_frames().unwrap();
        assert!(files.iter().all(|file| file.shared_place().is_some()));
        let reader = place.memory;
        drop((files, memory, cache));
        assert_eq!(rustix::fs::fstat(&reader).unwrap().st_blocks, 0, "of a closed cache");
    }

    #[test]
    fn places_are_those_of_readable_files_in_shared_memory() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let private = Cache::builder().memory(MIB).shared(false).build().unwrap();
        assert!(private.shared_frames().is_err());
        let options = OpenOptions::new();
        assert_eq!(private.open(file.path(), &options).unwrap().shared_place(), None);
        let shared = Cache::builder().memory(MIB).shared(true).build().unwrap();
        let writer = shared.open(file.path(), &OpenOptions::new().read(false).write(true)).unwrap();
        assert_eq!(writer.shared_place(), None, "not open for reading");
        let place = shared.open(file.path(), &options).unwrap().shared_place().unwrap();
        assert_eq!(shared.open(file.path(), &options).unwrap().shared_place(), Some(place));
    }
}
