//! The world of a model run: a few descriptors, frames of two words, one mapping and the LRU lists.
//!
//! The protocols are the real ones. Only the arena is replaced: by a list of free frames under a
//! lock, whose transfer of frames between threads the protocols rely on.
//!
//! # Safety
//! [`Checked`] is shared between threads; its contents are never accessed.
#![allow(unsafe_code)]

use crate::memory::Lru;
use crate::page::{
    Entry, Flag, Folio, FolioId, FolioRef, Folios, Frozen, LockedFolio, Lookup, Mapping,
    MemorySource, OldFolio, PAGE_BYTES, Reaper, Values, read_validated,
};
use crate::sync::{AtomicU64, Mutex, Ordering};
use std::sync::Arc;

/// Owner of the folios of the world.
pub(super) const OWNER: u64 = 64;

/// Contents of page 0: that of [`World::with_page_0`], and another one.
pub(super) const BEFORE: u64 = 1;
pub(super) const AFTER: u64 = 2;

/// The folio of [`one_folio`].
pub(super) const FOLIO: FolioId = FolioId(0);

#[derive(Debug)]
struct NoReaper;

impl Reaper for NoReaper {
    fn reap(&self, frozen: Frozen<'_>) {
        unreachable!("{:?} was freed", frozen.id());
    }
}

/// Returns the descriptor of one folio, which is never freed, for models without a mapping.
pub(super) fn one_folio() -> Folios {
    let folios = Folios::new(1, Box::new(NoReaper)).unwrap();
    folios.init_free(FOLIO, 1);
    let _for_ever = folios.start(FOLIO, OWNER, 0, 0).into_id();
    folios
}

/// Returns the Entry that an eviction stores at page `index`.
pub(super) fn left_at(index: u64) -> Entry {
    Entry::value(7 + index)
}

/// Returns the frames of a folio.
fn frames_of(first: FolioId, order: u8) -> impl Iterator<Item = FolioId> {
    (first.0..first.0 + (1 << order)).map(FolioId)
}

/// A marker for data with unordered accesses: loom fails the run if an access is not ordered after
/// a change, or a change not after an access.
#[derive(Debug, Default)]
pub(super) struct Checked(loom::cell::UnsafeCell<()>);

// SAFETY: the cell holds nothing and its pointer is never followed; it only records accesses.
unsafe impl Sync for Checked {}

impl Checked {
    pub(super) fn look(&self) {
        self.0.with(|_| ());
    }

    pub(super) fn change(&self) {
        self.0.with_mut(|_| ());
    }
}

/// A frame: content that is accessed by the rules of references and locks, and two words that
/// optimistic readers also read. Two, so that a torn read shows.
#[derive(Debug, Default)]
pub(super) struct Frame {
    pub(super) content: Checked,
    words: [AtomicU64; 2],
}

impl Frame {
    /// Changes the words one after the other, like a copy.
    pub(super) fn store(&self, value: u64) {
        self.words[0].store(value, Ordering::Relaxed);
        self.words[1].store(value, Ordering::Relaxed);
    }

    fn copy_from(&self, other: &Frame) {
        for (to, from) in self.words.iter().zip(&other.words) {
            to.store(from.load(Ordering::Relaxed), Ordering::Relaxed);
        }
    }

    pub(super) fn load(&self) -> [u64; 2] {
        let first = self.words[0].load(Ordering::Relaxed);
        [first, self.words[1].load(Ordering::Relaxed)]
    }
}

/// The frames, and which of them are free.
#[derive(Debug)]
struct Ground {
    frames: Vec<Frame>,
    free: Mutex<Vec<FolioId>>,
    lru: Arc<Lru>,
}

impl Reaper for Arc<Ground> {
    fn reap(&self, frozen: Frozen<'_>) {
        let id = frozen.id();
        self.lru.forget(frozen.folios(), id);
        assert!(!frozen.folio().flags.get(Flag::OnLru), "{id:?} freed while on a list");
        let mut free = self.free.lock();
        for frame in frames_of(id, frozen.folio().order()) {
            // The thread that frees a frame may change it.
            self.frames[frame.0 as usize].content.change();
            assert!(!free.contains(&frame), "{frame:?} freed twice");
            free.push(frame);
        }
    }
}

/// The shared state of one model run.
#[derive(Debug)]
pub(super) struct World {
    pub(super) folios: Folios,
    pub(super) mapping: Mapping,
    pub(super) lru: Arc<Lru>,
    /// Data that belongs to the owner of the folio at page 0.
    pub(super) place: Checked,
    ground: Arc<Ground>,
}

impl World {
    /// Creates a world of `frames` free frames, and a file of two folios of `order`; LRU lists with
    /// `cpus` batches.
    pub(super) fn new(frames: u32, order: u8, cpus: usize) -> Arc<Self> {
        Self::with_pages(frames, 2 << order, order, cpus)
    }

    /// Acts as [`Self::new`], with a file of `pages` pages.
    pub(super) fn with_pages(frames: u32, pages: u64, order: u8, cpus: usize) -> Arc<Self> {
        let lru = Arc::new(Lru::new(cpus));
        let ground = Arc::new(Ground {
            frames: (0..frames).map(|_| Frame::default()).collect(),
            free: Mutex::new((0..frames).map(FolioId).collect()),
            lru: Arc::clone(&lru),
        });
        let folios = Folios::new(frames as usize, Box::new(Arc::clone(&ground))).unwrap();
        folios.init_free(FolioId(0), frames as usize);
        let mapping = Mapping::new(
            &MemorySource::Private,
            order,
            pages * PAGE_BYTES,
            pages * PAGE_BYTES,
            Values::Hints,
        )
        .unwrap();
        mapping.table().set_charged(0);
        Arc::new(Self { folios, mapping, lru, place: Checked::default(), ground })
    }

    /// Creates a world of `frames` frames, with one of them at page 0.
    pub(super) fn with_page_0(frames: u32) -> Arc<Self> {
        let world = Self::new(frames, 0, 1);
        assert!(world.fill(0, Entry::HOLE, BEFORE));
        world
    }

    pub(super) fn frame(&self, id: FolioId) -> &Frame {
        &self.ground.frames[id.0 as usize]
    }

    /// Returns the number of free frames.
    pub(super) fn free_frames(&self) -> usize {
        self.ground.free.lock().len()
    }

    /// Starts a new folio of page `index` in free frames.
    pub(super) fn allocate(&self, index: u64) -> FolioRef<'_> {
        let order = self.mapping.order();
        self.folios.start(self.take_frames(order), OWNER, index, order)
    }

    /// Takes frames for a folio of `order`: the first ones that are free and naturally aligned.
    fn take_frames(&self, order: u8) -> FolioId {
        let mut free = self.ground.free.lock();
        let firsts = (0..self.ground.frames.len() as u32).step_by(1 << order).map(FolioId);
        let is_free = |first: &FolioId| frames_of(*first, order).all(|frame| free.contains(&frame));
        let first = firsts.into_iter().find(is_free).expect("free frames");
        free.retain(|frame| !frames_of(first, order).any(|taken| taken == *frame));
        first
    }

    /// Fills the folio at `index`, whose Entry was `seen`, with `value`. Returns `false` if another
    /// thread was faster.
    pub(super) fn fill(&self, index: u64, seen: Entry, value: u64) -> bool {
        let order = self.mapping.order();
        // Without an owner until it is locked, as in `file::fill`.
        let folio = self.folios.start(self.take_frames(order), 0, index, order);
        let locked = folio.lock();
        Folio::set_owner(&locked, OWNER);
        let for_table = folio.try_clone().expect("the count is far from its limit");
        if self.mapping.insert(&self.folios, &locked, for_table, seen).is_err() {
            return false;
        }
        for frame in frames_of(folio.id(), order) {
            self.frame(frame).content.change();
            self.frame(frame).store(value);
        }
        self.mapping.mark_uptodate(&locked);
        true
    }

    /// Moves the folio of page `index` to other frames, as `Reclaim::migrate` does. Returns `true`
    /// on success.
    pub(super) fn relocate(&self, index: u64) -> bool {
        let Some(folio) = self.find(index) else { return false };
        let Some(lock) = folio.try_lock() else { return false };
        if lock.owner() != OWNER || !lock.flags.get(Flag::Uptodate) {
            return false;
        }
        let order = lock.order();
        let new = self.folios.start(self.take_frames(order), 0, index, order);
        let locked = new.lock();
        let for_table = new.try_clone().expect("the count is far from its limit");
        let old_id = folio.id();
        let copy = || {
            for (from, to) in frames_of(old_id, order).zip(frames_of(new.id(), order)) {
                self.frame(to).content.change();
                self.frame(from).content.look();
                self.frame(to).copy_from(self.frame(from));
            }
        };
        locked.copy_usage_of(&lock);
        let old = OldFolio { lock, folio };
        let moved = self.mapping.relocate(&self.folios, old, &locked, for_table, copy);
        let is_moved = moved.is_ok();
        if let Ok(frozen) = moved {
            locked.take_first_use_of(&frozen);
            frozen.free();
        }
        is_moved
    }

    /// Returns the folio that a lookup of page `index` finds, if any.
    pub(super) fn find(&self, index: u64) -> Option<FolioRef<'_>> {
        match self.mapping.get_folio(&self.folios, index) {
            Lookup::Folio(folio) => Some(folio),
            Lookup::Absent(_) => None,
            Lookup::Refused => panic!("the count is far from its limit"),
        }
    }

    /// Returns the Entry of a page, as this thread sees it now.
    pub(super) fn entry(&self, index: u64) -> Entry {
        self.mapping.table().load(index, Ordering::Acquire)
    }

    /// Evicts and frees the folio of page `index`. Returns `true` on success.
    pub(super) fn evict(&self, index: u64) -> bool {
        let Some(folio) = self.find(index) else { return false };
        let locked = folio.lock();
        if locked.owner() != OWNER {
            return false;
        }
        let first = locked.index();
        let entry_after = |page| left_at(first + page);
        let Ok(frozen) = self.mapping.evict(folio, &locked, entry_after) else { return false };
        drop(locked);
        frozen.free();
        true
    }

    /// Removes the folio of page `index` from the table, even if it is referenced.
    pub(super) fn remove(&self, index: u64) {
        let Some(folio) = self.find(index) else { return };
        let locked = folio.lock();
        if locked.owner() != OWNER {
            return;
        }
        let for_table = self.mapping.remove(&folio, &locked, &self.folios, |_| Entry::HOLE);
        drop(locked);
        drop((for_table, folio));
    }

    /// Changes page `index` to `value` in a write section, if its folio is resident.
    pub(super) fn write(&self, index: u64, value: u64) {
        let Some(folio) = self.find(index) else { return };
        let locked = folio.lock();
        if locked.owner() == OWNER {
            self.write_locked(&folio, &locked, index, value);
        }
    }

    fn write_locked(&self, folio: &FolioRef<'_>, locked: &LockedFolio<'_>, index: u64, value: u64) {
        let _section = self.mapping.begin_write_section(locked, index..index + 1);
        let frame = folio.id().0 + (index - locked.index()) as u32;
        self.frame(FolioId(frame)).store(value);
    }

    /// Punches page `index`: removes a folio of that page alone, zeroes the page in a larger one.
    pub(super) fn punch(&self, index: u64) {
        let Some(folio) = self.find(index) else { return };
        let locked = folio.lock();
        if locked.owner() != OWNER {
            return;
        }
        if locked.order() > 0 {
            return self.write_locked(&folio, &locked, index, 0);
        }
        let for_table = self.mapping.remove(&folio, &locked, &self.folios, |_| Entry::HOLE);
        drop(locked);
        drop((for_table, folio));
    }

    /// Truncates the file to its first `pages` pages.
    pub(super) fn truncate(&self, pages: u64) {
        self.mapping.set_len_bytes(pages * PAGE_BYTES);
        self.mapping.begin_walk_behind_end();
        let mut index = pages;
        while let Some(found) = self.mapping.table().next_folio(index) {
            self.punch(found);
            index = found + 1;
        }
    }

    /// Zeroes the folio at `index` from the middle of its first page on, as a truncation does.
    pub(super) fn zero_from_middle(&self, index: u64) {
        let Some(folio) = self.find(index) else { return };
        let locked = folio.lock();
        let _section = self.mapping.begin_write_section(&locked, index..index + locked.pages());
        self.frame(folio.id()).words[1].store(0, Ordering::Relaxed);
        for frame in folio.id().0 + 1..folio.id().0 + locked.pages() as u32 {
            self.frame(FolioId(frame)).store(0);
        }
    }

    /// Reads page `index` optimistically.
    pub(super) fn read(&self, index: u64) -> Option<[u64; 2]> {
        let word = self.mapping.table().word(index);
        read_validated(word, Entry::is_ready, |entry| self.frame(FolioId(entry.frame())).load())
    }
}

/// Starts a thread of the model with its own handle of the shared state.
pub(super) fn spawn<S: Send + Sync + 'static, R: Send + 'static>(
    shared: &Arc<S>,
    run: impl FnOnce(&S) -> R + Send + 'static,
) -> loom::thread::JoinHandle<R> {
    let shared = Arc::clone(shared);
    loom::thread::spawn(move || run(&shared))
}

/// Joins the threads and returns their results.
pub(super) fn join_all<R, const N: usize>(threads: [loom::thread::JoinHandle<R>; N]) -> [R; N] {
    threads.map(|thread| thread.join().unwrap())
}

/// Runs a model without a bound on preemptions, whatever the environment sets.
pub(super) fn model(run: impl Fn() + Send + Sync + 'static) {
    check(None, run);
}

/// Runs a model with at most `preemptions`, for models that would otherwise take minutes.
pub(super) fn model_bounded(preemptions: usize, run: impl Fn() + Send + Sync + 'static) {
    check(Some(preemptions), run);
}

fn check(preemptions: Option<usize>, run: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = preemptions;
    builder.max_branches = builder.max_branches.max(10_000);
    builder.check(run);
}

/// Reads page 0 once: whole, and what it had before or after a change, or not at all.
pub(super) fn read_page_0(world: &World) {
    if let Some([first, second]) = world.read(0) {
        assert_eq!(first, second, "torn");
        assert!([BEFORE, AFTER].contains(&first), "{first} was never in the page");
    }
}
