//! The world of a model run: a few descriptors, frames of two words, one mapping and the lists.
//!
//! The protocols are the real ones. Invented here is only what stands in for the arena: a list of
//! free frames under a lock, whose hand-over of frames the protocols rely on.
//!
//! # Safety
//! [`Checked`] is shared between threads; nothing in it is ever touched.
#![allow(unsafe_code)]

use crate::folio::{Flag, FolioId, FolioRef, Folios, Frozen, Reaper};
use crate::lru::Lru;
use crate::mapping::{Entry, Lookup, Mapping, PAGE_BYTES, Successor, read_validated};
use crate::sync::{AtomicU64, Mutex, Ordering};
use std::sync::Arc;

/// What the folios of the world have for an owner.
pub(super) const OWNER: u64 = 64;
/// The Entry an eviction leaves.
pub(super) fn shadow() -> Entry {
    Entry::value(7)
}

/// Something that must not be changed while anybody else is at it: loom fails the run if an access
/// is not ordered after a change, or a change not after an access.
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
/// optimistic readers read as well. Two, so that a torn read shows.
#[derive(Debug, Default)]
pub(super) struct Frame {
    pub(super) content: Checked,
    words: [AtomicU64; 2],
}

impl Frame {
    /// Changes the words one after the other, as a copy would.
    pub(super) fn store(&self, value: u64) {
        self.words[0].store(value, Ordering::Relaxed);
        self.words[1].store(value, Ordering::Relaxed);
    }

    fn load(&self) -> [u64; 2] {
        let first = self.words[0].load(Ordering::Relaxed);
        [first, self.words[1].load(Ordering::Relaxed)]
    }
}

/// The frames, and those of them that are free.
#[derive(Debug)]
struct Ground {
    frames: Vec<Frame>,
    free: Mutex<Vec<FolioId>>,
    lru: Arc<Lru>,
}

impl Reaper for Arc<Ground> {
    fn reap(&self, frozen: Frozen<'_>) {
        let id = frozen.id();
        // Whoever frees may do with the frame what it likes.
        self.frames[id.0 as usize].content.change();
        self.lru.forget(frozen.folios(), id);
        let mut free = self.free.lock();
        assert!(!free.contains(&id), "{id:?} freed twice");
        assert!(!frozen.folio().flags.get(Flag::OnLru), "{id:?} freed while on a list");
        free.push(id);
    }
}

/// See the head of the file.
#[derive(Debug)]
pub(super) struct World {
    pub(super) folios: Folios,
    pub(super) mapping: Mapping,
    pub(super) lru: Arc<Lru>,
    /// What belongs to whoever's folio stands at page 0.
    pub(super) place: Checked,
    ground: Arc<Ground>,
}

impl World {
    /// `frames` free frames, and a file of two folios of `order`; lists with `cpus` batches.
    pub(super) fn new(frames: u32, order: u8, cpus: usize) -> Arc<Self> {
        let lru = Arc::new(Lru::new(cpus));
        let ground = Arc::new(Ground {
            frames: (0..frames).map(|_| Frame::default()).collect(),
            free: Mutex::new((0..frames).step_by(1 << order).map(FolioId).rev().collect()),
            lru: Arc::clone(&lru),
        });
        let folios = Folios::new(frames as usize, Box::new(Arc::clone(&ground))).unwrap();
        folios.init_free(FolioId(0), frames as usize);
        let len_bytes = (2 * PAGE_BYTES) << order;
        let mapping = Mapping::new(order, len_bytes, len_bytes).unwrap();
        Arc::new(Self { folios, mapping, lru, place: Checked::default(), ground })
    }

    pub(super) fn frame(&self, id: FolioId) -> &Frame {
        &self.ground.frames[id.0 as usize]
    }

    /// Frames that are free now.
    pub(super) fn free_frames(&self) -> usize {
        self.ground.free.lock().len()
    }

    /// A new folio of page `index` in a free frame.
    pub(super) fn allocate(&self, index: u64) -> FolioRef<'_> {
        let id = self.ground.free.lock().pop().expect("a free frame");
        self.folios.start(id, OWNER, index, self.mapping.order())
    }

    /// Fills the folio at `index`, where `seen` stood, with `value`. `false`: somebody was faster.
    pub(super) fn fill(&self, index: u64, seen: Entry, value: u64) -> bool {
        let folio = self.allocate(index);
        let locked = folio.lock();
        let for_table = folio.try_clone().expect("few references");
        if self.mapping.insert(&self.folios, &locked, for_table, seen).is_err() {
            return false;
        }
        self.frame(folio.id()).content.change();
        for frame in folio.id().0..folio.id().0 + locked.pages() as u32 {
            self.frame(FolioId(frame)).store(value);
        }
        self.mapping.mark_uptodate(&locked);
        true
    }

    /// What a lookup of page `index` finds, if it is a folio.
    pub(super) fn find(&self, index: u64) -> Option<FolioRef<'_>> {
        match self.mapping.get_folio(&self.folios, index, &mut 0) {
            Lookup::Folio(folio) => Some(folio),
            Lookup::Absent(_) => None,
            Lookup::Refused => panic!("few references"),
        }
    }

    /// The Entry of a page, as one thread sees it now.
    pub(super) fn entry(&self, index: u64) -> Entry {
        self.mapping.table().load(index, Ordering::Acquire)
    }

    /// Evicts and frees the folio of page `index`; tells whether that worked.
    pub(super) fn evict(&self, index: u64) -> bool {
        let Some(folio) = self.find(index) else { return false };
        let locked = folio.lock();
        let Ok(frozen) = self.mapping.evict(folio, &locked, shadow()) else { return false };
        drop(locked);
        frozen.free();
        true
    }

    /// Moves the folio of page `index` to a free frame; tells whether that worked.
    pub(super) fn relocate(&self, index: u64) -> bool {
        let Some(folio) = self.find(index) else { return false };
        let locked = folio.lock();
        let new = self.allocate(locked.index());
        let new_locked = new.lock();
        let for_table = new.try_clone().expect("few references");
        let (from, to) = (folio.id().0, new.id().0);
        let copy = || {
            self.frame(new.id()).content.change();
            for page in 0..locked.pages() as u32 {
                let words = self.frame(FolioId(from + page)).load();
                assert_eq!(words[0], words[1], "nobody changes it now");
                self.frame(FolioId(to + page)).store(words[0]);
            }
        };
        let successor = Successor { locked: &new_locked, for_table };
        let Ok(frozen) = self.mapping.relocate(folio, &locked, successor, copy) else {
            return false;
        };
        drop(locked);
        frozen.free();
        true
    }

    /// Takes the folio of page `index` out of the table whatever it holds.
    pub(super) fn remove(&self, index: u64) {
        let Some(folio) = self.find(index) else { return };
        let locked = folio.lock();
        let for_table = self.mapping.remove(&folio, &locked, &self.folios);
        drop(locked);
        drop((for_table, folio));
    }

    /// Changes the folio of page `index` to `value` through a write window.
    pub(super) fn write(&self, index: u64, value: u64) {
        let Some(folio) = self.find(index) else { return };
        let locked = folio.lock();
        if locked.owner() != OWNER {
            return;
        }
        let _window = self.mapping.open_window(&locked, index..index + 1);
        self.frame(folio.id()).store(value);
    }

    /// Zeroes the folio at `index` from the middle of its first page on, as a cut of the file does.
    pub(super) fn zero_from_middle(&self, index: u64) {
        let Some(folio) = self.find(index) else { return };
        let locked = folio.lock();
        let _window = self.mapping.open_window(&locked, index..index + locked.pages());
        self.frame(folio.id()).words[1].store(0, Ordering::Relaxed);
        for frame in folio.id().0 + 1..folio.id().0 + locked.pages() as u32 {
            self.frame(FolioId(frame)).store(0);
        }
    }

    /// An optimistic read of page `index`.
    pub(super) fn read(&self, index: u64) -> Option<[u64; 2]> {
        let word = self.mapping.table().word(index);
        read_validated(word, Entry::is_ready, |entry| self.frame(FolioId(entry.frame())).load())
    }
}

/// A thread of the model, on its own handle of what the threads share.
pub(super) fn spawn<S: Send + Sync + 'static, R: Send + 'static>(
    shared: &Arc<S>,
    run: impl FnOnce(&S) -> R + Send + 'static,
) -> loom::thread::JoinHandle<R> {
    let shared = Arc::clone(shared);
    loom::thread::spawn(move || run(&shared))
}

/// What threads of the model came to.
pub(super) fn join_all<R, const N: usize>(threads: [loom::thread::JoinHandle<R>; N]) -> [R; N] {
    threads.map(|thread| thread.join().unwrap())
}

/// Runs all of a model: no bound on preemptions, whatever the environment asks for.
pub(super) fn model(run: impl Fn() + Send + Sync + 'static) {
    check(None, run);
}

/// Runs a model with at most `preemptions`, where all of it would take minutes.
pub(super) fn model_bounded(preemptions: usize, run: impl Fn() + Send + Sync + 'static) {
    check(Some(preemptions), run);
}

fn check(preemptions: Option<usize>, run: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = preemptions;
    builder.max_branches = builder.max_branches.max(10_000);
    builder.check(run);
}
