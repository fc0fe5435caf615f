//! Hits of another process, the client: the owner's frames, tables and lengths, mapped for reading.
//!
//! A hit is that of `file/hit.rs`, over other addresses: Entries name frames by offsets. It differs
//! in three things. A page that is READY but not marked as used is read all the same, because the
//! client cannot mark it, and is reported to the caller. Nothing is counted. And the client's
//! [`Window::turn_off`] ends all hits at once: when the owner is gone, no one changes Entries any
//! more, and a file may change without them.
//!
//! PROTOCOL SHARE. The client holds nothing that the owner waits for: no lock, no reference, no
//! count. So the owner gives memory back under the client's reads, and both loads of the Entry
//! must make that known.
//!
//! ```text
//!  CLIENT, a hit                              OWNER, gives memory back
//!  H1 load Entry (Acquire)                    G1 store Entry: hole or shadow (READ-E1..E4)
//!  H2 load the length; copy the bytes of      G2 a frame: fill it with another page (READ-I1..I3),
//!     the frame that the Entry names             or punch a hole in the memory
//!  H3 fence (Acquire)                         G3 a table page without a folio: punch a hole
//!  H4 load Entry: READY in H1, and the        G4 insert: READY with a later version (READ-I1..I3)
//!     same version? then the bytes are
//!     those of the page in one state
//! ```
//!
//! - Both processes run READ-O1..O4 and its partners: an atomic word is the same word whoever maps
//!   it, and so are fences.
//! - A hole of G2 reads as zeros. The kernel makes it under its locks, and fills it again on the
//!   first touch: a copy that saw such a zero follows the hole, the hole follows G1, so H4 sees G1
//!   or something later.
//! - A hole of G3 reads as zeros, which is a hole of the file. H1 and H4 see it as what G1 stored:
//!   not READY. G2 of `page/table.rs` looked at every Entry before, and none named a folio.
//! - G4 never restores a word: the version of a frame is in its descriptor, which is in memory that
//!   the owner alone has, and which is never given back.
//! - A file that the owner closes: its part of the memory is punched and never used again, so that
//!   all of its Entries are holes for ever. No client reads another file through them.
//!
//! Covered by `loom_shared_read`.
//!
//! # Safety
//! Reads words and frames of memory that stays mapped as long as its [`SharedView`], and whose
//! length is sealed: no access raises SIGBUS for lack of a page in the file. The owner of the
//! memory is trusted to write Entries that lead into the frames (ENTRY-1).
#![allow(unsafe_code)]

use super::{FilePlace, FramePlace};
use crate::page::{Entry, Hot, PAGE_BYTES, PAGE_SHIFT, is_in_one_page, read_validated};
use crate::sync::{AtomicU64, Ordering};
use crate::sys::copy;
use crate::sys::memory::{HUGE_PAGE_BYTES, PAGE_BYTES as KERNEL_PAGE_BYTES, Reservation};
use crate::sys::view::SharedView;
use std::cell::Cell;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

/// The frames of another process's cache.
#[derive(Debug)]
pub struct Window {
    frames: SharedView,
    memory: OwnedFd,
    /// A page with one word: 1 while hits are on. In a forked child it reads as 0, because the
    /// child has no thread that would turn its hits off.
    switch: Reservation,
}

impl Window {
    /// Maps the frames at `place`.
    ///
    /// # Errors
    /// A place that is not in the memory; a kernel that refuses the address space, or to wipe a
    /// page in forked children.
    pub fn new(place: FramePlace) -> io::Result<Arc<Self>> {
        let (offset_bytes, length_bytes) = (place.offset_bytes, place.length_bytes);
        // Huge pages of the owner are mapped as such.
        let frames =
            SharedView::new(place.memory.as_fd(), offset_bytes, length_bytes, HUGE_PAGE_BYTES)?;
        let switch = Reservation::new(KERNEL_PAGE_BYTES, KERNEL_PAGE_BYTES)?;
        if !switch.wipe_on_fork() {
            let problem = "the kernel cannot wipe a page in forked children (MADV_WIPEONFORK)";
            return Err(io::Error::new(io::ErrorKind::Unsupported, problem));
        }
        let window = Self { frames, memory: place.memory, switch };
        window.switch_word().store(1, Ordering::Relaxed);
        Ok(Arc::new(window))
    }

    /// Returns `true` until [`Self::turn_off`], in the process that made the window.
    #[inline(always)]
    pub fn is_on(&self) -> bool {
        // Relaxed: a hit that runs beside the change is as good as one just before it.
        self.switch_word().load(Ordering::Relaxed) == 1
    }

    /// Ends all hits, for ever.
    pub fn turn_off(&self) {
        self.switch_word().store(0, Ordering::Relaxed);
    }

    #[inline(always)]
    fn switch_word(&self) -> &AtomicU64 {
        // SAFETY: the first word of a page of zeros that is mapped as long as `self`, and only used
        // as this word.
        unsafe { &*self.switch.base.cast() }
    }

    /// Copies bytes of the frames, of a page that the owner keeps there for this process. Returns
    /// `false` if they are not in the frames.
    pub fn copy_frames(&self, offset_bytes: u64, target: &mut [u8]) -> bool {
        let end = offset_bytes.checked_add(target.len() as u64);
        if end.is_none_or(|end| end > self.frames.len() as u64) {
            return false;
        }
        let source = self.frames.base().wrapping_add(offset_bytes as usize);
        // SAFETY: inside the mapped frames; `target` is the caller's memory.
        unsafe { copy::copy_out(source, target) };
        true
    }
}

/// A file of another process's cache.
#[derive(Debug)]
pub struct FileWindow {
    entries: *const AtomicU64,
    frames: *const u8,
    hot: *const Hot,
    /// End of the positions that have an Entry at `entries`, in bytes.
    entries_end: u64,
    /// The word of the window, in this value: each dependent load makes a hit slower.
    switch: *const AtomicU64,
    _window: Arc<Window>,
    _entries_view: SharedView,
    _hot_view: SharedView,
}

// SAFETY: the addresses are of atomic words and of frames, which are read by opaque copies, in
// mappings that live as long as the value.
unsafe impl Send for FileWindow {}
// SAFETY: as above; no method changes anything.
unsafe impl Sync for FileWindow {}

impl FileWindow {
    /// Maps the words of a file, which the owner keeps open for this process.
    ///
    /// # Errors
    /// As for [`Window::new`].
    pub fn new(window: &Arc<Window>, place: &FilePlace) -> io::Result<Self> {
        let bytes = place.entries.checked_mul(size_of::<u64>() as u64);
        let bytes = bytes.and_then(|bytes| bytes.checked_next_multiple_of(PAGE_BYTES));
        let bytes = bytes.ok_or(io::ErrorKind::InvalidInput)?;
        let memory = window.memory.as_fd();
        let map = |offset, bytes| SharedView::new(memory, offset, bytes, KERNEL_PAGE_BYTES);
        let entries_view = map(place.entries_offset, bytes)?;
        let hot_view = map(place.hot_offset, PAGE_BYTES)?;
        Ok(Self {
            entries: entries_view.base().cast(),
            frames: window.frames.base(),
            hot: hot_view.base().cast(),
            entries_end: place.entries.saturating_mul(PAGE_BYTES),
            switch: window.switch_word(),
            _window: Arc::clone(window),
            _entries_view: entries_view,
            _hot_view: hot_view,
        })
    }

    /// Returns the length of the file in bytes.
    #[inline(always)]
    pub fn len_bytes(&self) -> u64 {
        self.hot().len_bytes()
    }

    /// Copies the first bytes at `position` that are resident, up to the first page that is not.
    /// Returns their number: 0 also for bytes past the end, for an empty buffer, and while hits are
    /// off. Calls `note` with each page that was read and is not marked as used.
    ///
    /// The bytes of one page are those of one moment. Bytes of `buffer` after those returned are
    /// unchanged or zero.
    #[inline(always)]
    pub fn read(&self, buffer: &mut [u8], position: u64, mut note: impl FnMut(u64)) -> usize {
        let length = buffer.len();
        if is_in_one_page(position, length as u64) & self.may_read(position, length as u64) {
            let is_read = self.read_page(buffer, position, &mut note);
            return if is_read { length } else { 0 };
        }
        self.read_pages(buffer, position, note)
    }

    /// Returns `true` if hits are on, and the bytes have an Entry in the mapped array and end in
    /// the file. (A look at the Entry of a page past the end would make a page of the table
    /// resident, which the owner has not charged.)
    #[inline(always)]
    fn may_read(&self, position: u64, length: u64) -> bool {
        // SAFETY: the word of the window, which this keeps.
        let switch = unsafe { &*self.switch };
        // Relaxed: as in `Window::is_on`.
        let is_on = switch.load(Ordering::Relaxed) == 1;
        // All conditions in one branch: see `read_validated`.
        let end = position.wrapping_add(length);
        is_on & (position < self.entries_end) & (end <= self.hot().len_bytes())
    }

    #[inline(never)]
    fn read_pages(&self, buffer: &mut [u8], position: u64, mut note: impl FnMut(u64)) -> usize {
        let mut done = 0;
        while done < buffer.len() {
            let Some(at) = position.checked_add(done as u64) else { break };
            let in_page = (PAGE_BYTES - (at & (PAGE_BYTES - 1))) as usize;
            let end = buffer.len().min(done + in_page);
            let is_hit = self.may_read(at, (end - done) as u64)
                && self.read_page(&mut buffer[done..end], at, &mut note);
            if !is_hit {
                break;
            }
            done = end;
        }
        done
    }

    /// Reads bytes that lie in one page, and that may be read (SHARE-H1..H4). Returns `false` if
    /// they are no hit.
    #[inline(always)]
    fn read_page(&self, buffer: &mut [u8], position: u64, note: &mut impl FnMut(u64)) -> bool {
        let end = position + buffer.len() as u64;
        self.touch_predicted(position);
        let index = position >> PAGE_SHIFT;
        // SAFETY: the callers have checked that the page lies below `entries_end`: the mapped array
        // has an Entry for it.
        let word = unsafe { &*self.entries.wrapping_add(index as usize) };
        let copies = Cell::new(false);
        let is_wanted = |entry: Entry| entry.is_ready() & copies.get();
        let read = read_validated(word, is_wanted, |entry| {
            // Loaded after the Entry: a truncation sets the length before it changes the bytes past
            // it.
            if end <= self.hot().len_bytes() {
                copies.set(true);
                let in_page = (position & (PAGE_BYTES - 1)) as usize;
                let source = self.frames.wrapping_add(entry.frame_offset_bytes() + in_page);
                // SAFETY: every Entry leads to a frame (ENTRY-1) of the mapped frames, and the
                // range ends inside its page; `buffer` is the caller's memory.
                unsafe { copy::copy_out(source, buffer) };
            }
            entry.is_referenced()
        });
        if let Some(is_marked) = read {
            if !is_marked {
                note(index);
            }
            return true;
        }
        if copies.get() {
            // Bytes of another page, possibly of another file.
            buffer.fill(0);
        }
        false
    }

    /// Prefetches the first bytes at their predicted address, as in `file/hit.rs`.
    #[inline(always)]
    fn touch_predicted(&self, position: u64) {
        let distance = self.hot().predicted_distance();
        if distance != 0 {
            let address = self.frames.wrapping_add(distance.wrapping_add(position) as usize);
            copy::prefetch_lines(address, 1);
        }
    }

    #[inline(always)]
    fn hot(&self) -> &Hot {
        // SAFETY: the words at the begin of a mapped page, where the owner has them.
        unsafe { &*self.hot }
    }
}
