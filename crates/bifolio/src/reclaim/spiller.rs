//! The spiller: pages of memory files on their way to the spill, and the thread that writes them.
//!
//! Whoever has the turn chooses folios and leaves them here; they are written without it, by a
//! thread that nobody else waits for, or by one that wants memory for a memory file. So a spill
//! that does not answer holds up those, and whoever wants memory that nothing else can give him,
//! and no other file.
//!
//! ```text
//!  WITH THE TURN (scan.rs, evacuate.rs)         THE SPILLER'S THREAD
//!  P1 isolate a folio that is to be spilled     P3 take the line; with the turn: whose is each?
//!  P2 into the line, with its reference, if        keep their files alive; add what is dirty in
//!     there is room; call the thread               awaited rows (`rows.rs`); let go of the turn
//!                                               P4 write out, file by file (of a region: B1 to B9
//!                                                  of `unmap.rs`, with an exit of its own)
//!                                               P5 with the turn: evict what is clean; the others
//!                                                  go back to their list; clear rows; wake who
//!                                                  waits
//! ```
//!
//! A folio is in the line, or taken, once: it is on no list then (LRU-1). Its reference keeps its
//! frames, and not its file: that may be closed meanwhile, and the folio is without an owner at P3.
//! A file that P3 has found is kept while it is written.
//!
//! COMING. What is in the line and what the thread has taken will be free soon: who needs as much
//! waits for it, instead of looking for more. Unless the spill is *slow*: a round that takes longer
//! than [`SLOW`] counts for nothing, as one after a round in vain; what is clean goes, wherever it
//! is.
//!
//! TROUBLE, as a device has it (`writeback/device.rs`): a round in which the spill took nothing and
//! refused something. Whoever finds nothing but what is to be spilled fails after some rounds, the
//! last of them in vain, that began after he came: then the spill was asked on his behalf.

use super::pageout::{Verdict, WriteOut, is_pinned};
use super::patience::Patience;
use super::rows::Row;
use super::scan::{How, ScanCounts};
use super::unmap::{Owners, Unmapping};
use super::{Reclaim, Turn};
use crate::error::{ErrorKind, Result};
use crate::folio::{FolioId, FolioRef};
use crate::frames::{Regions, RegionsSize};
use crate::io::IoError;
use crate::lru::ListKind;
use crate::spill::Spill;
use crate::stats::Counter;
use crate::sync::{AtomicU64, Condvar, Mutex, Ordering};
use crate::sys::thread::OwnedThread;
use crate::writeback::Inode;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Pages that leave together, if there are so many: a transfer of 1 MiB.
pub(super) const SPILL_PAGES: u64 = 256;
/// The most pages in the line: while one transfer is on its way, the next are chosen. In a small
/// cache a part of the bound.
const LINE_PAGES_MAX: u64 = 2 * SPILL_PAGES;
const LINE_PART_OF_BOUND: u64 = 4;
/// Every so many of them look for more, though enough is on its way to the spill: that may be of
/// the wrong size.
const SWEEPS_WITH_SPILLER: u32 = 8;
/// How long a round is waited for by those who might find something else.
const SLOW: Duration = Duration::from_millis(50);

/// See the head of the file.
#[derive(Debug, Default)]
pub(super) struct Spiller {
    line: Mutex<Line>,
    called: Condvar,
    /// Pages in the line, and those that were taken.
    pages: AtomicU64,
}

#[derive(Debug, Default)]
struct Line {
    /// Isolated folios, each with its reference.
    folios: Vec<FolioId>,
    pages: u64,
    /// When the round began that is under way.
    since: Option<Instant>,
    /// Rounds that have begun, and the last one if it was in vain.
    rounds: u64,
    trouble: Option<u64>,
    /// There is somebody to take what is in the line.
    is_served: bool,
    is_ending: bool,
}

impl Spiller {
    /// Pages that will be free soon; none while the spill is slow, or in trouble.
    pub(super) fn coming_pages(&self) -> u64 {
        let pages = self.pages();
        if pages == 0 || self.line.lock().is_late() { 0 } else { pages }
    }

    /// Whether those who could do something else do not wait for the spill: it is slow, or takes
    /// nothing.
    pub(super) fn is_late(&self) -> bool {
        self.line.lock().is_late()
    }

    /// Pages in the line, and those that were taken.
    pub(super) fn pages(&self) -> u64 {
        // Relaxed: a hint; what was freed is found under other locks.
        self.pages.load(Ordering::Relaxed)
    }

    /// Rounds that have begun.
    pub(super) fn rounds(&self) -> u64 {
        self.line.lock().rounds
    }

    /// Whether the last round was in vain, and is none of the first so many.
    pub(super) fn has_trouble_after(&self, round: u64) -> bool {
        self.line.lock().trouble.is_some_and(|trouble| trouble > round)
    }

    /// P3: waits for folios, and for the round that is under way; `None` when all is to end.
    fn next_round(&self) -> Option<Vec<FolioId>> {
        let mut line = self.line.lock();
        loop {
            if line.is_ending {
                return None;
            }
            let chosen = line.begin_round();
            if chosen.is_some() {
                return chosen;
            }
            self.called.wait(&mut line);
        }
    }

    /// P5: a round has ended.
    fn end_round(&self, pages: u64, has_taken: bool, has_refused: bool) {
        let mut line = self.line.lock();
        line.since = None;
        if has_taken {
            line.trouble = None;
        } else if has_refused {
            line.trouble = Some(line.rounds);
        }
        self.pages.fetch_sub(pages, Ordering::Relaxed);
        let is_called = !line.folios.is_empty();
        drop(line);
        if is_called {
            self.called.notify_one();
        }
    }
}

impl Line {
    fn is_late(&self) -> bool {
        self.trouble.is_some() || self.since.is_some_and(|since| since.elapsed() > SLOW)
    }

    /// Takes what is there, if anything is, and nobody is at it: one round at a time.
    fn begin_round(&mut self) -> Option<Vec<FolioId>> {
        if self.folios.is_empty() || self.since.is_some() {
            return None;
        }
        self.rounds += 1;
        self.since = Some(Instant::now());
        self.pages = 0;
        Some(std::mem::take(&mut self.folios))
    }
}

impl Reclaim {
    /// P2: leaves isolated folios to the spiller. Answers those for which there is no room.
    pub(super) fn leave_to_spiller<'a>(&self, folios: Vec<FolioRef<'a>>) -> Vec<FolioRef<'a>> {
        let pages_max = self.line_pages_max();
        let mut line = self.spiller.line.lock();
        if !line.is_served || line.is_ending {
            return folios;
        }
        let mut refused = Vec::new();
        for folio in folios {
            let pages = folio.folio().pages();
            if line.pages > 0 && line.pages + pages > pages_max {
                refused.push(folio);
                continue;
            }
            line.pages += pages;
            self.spiller.pages.fetch_add(pages, Ordering::Relaxed);
            line.folios.push(folio.into_id());
        }
        drop(line);
        self.spiller.called.notify_one();
        refused
    }

    /// Whether what is on its way to the spill is waited for before more is looked for: most times.
    pub(super) fn awaits_spiller(&self, patience: &Patience) -> bool {
        let is_due = (patience.futile_sweeps + 1).is_multiple_of(SWEEPS_WITH_SPILLER);
        !is_due && self.spiller.coming_pages() > 0
    }

    /// The memory that regions need beside their pages, in batches of so many.
    pub(crate) fn regions_size(&self, batch: usize) -> RegionsSize {
        Regions::size_for(self.arena(), batch, self.spill.is_some())
    }

    /// Whether a folio of a region that was just isolated is for the spiller, clean or not; an
    /// error says why it stays; `None`: its file has no spill.
    pub(super) fn choose_for_spill(
        &self,
        turn: &Turn<'_>,
        folio: &FolioRef<'_>,
        second_chance: bool,
    ) -> Option<std::result::Result<(), Verdict>> {
        let inode = turn.owner_of_isolated(folio).filter(|inode| inode.spill().is_some())?;
        // Hints, without the lock: the spiller looks again.
        if second_chance && inode.mapping.test_and_clear_referenced(folio.folio()) {
            return Some(Err(Verdict::Activate));
        }
        let index = folio.folio().index();
        let is_held = inode.frames.region().is_some_and(|region| region.is_held(index));
        Some(if is_held || is_pinned(folio) { Err(Verdict::Pinned) } else { Ok(()) })
    }

    /// Whether the line has room for a transfer.
    pub(super) fn has_room_in_line(&self) -> bool {
        let pages_max = self.line_pages_max();
        self.spiller.line.lock().pages + SPILL_PAGES.min(pages_max) <= pages_max
    }

    fn line_pages_max(&self) -> u64 {
        let part = self.arena().bound_pages() / LINE_PART_OF_BOUND;
        LINE_PAGES_MAX.min(part).max(super::ROUND_PAGES)
    }

    fn run_spiller(&self, spill: &Spill) {
        while let Some(chosen) = self.spiller.next_round() {
            self.go_on_round(spill, chosen);
        }
        let mut line = self.spiller.line.lock();
        line.is_served = false;
        let left = std::mem::take(&mut line.folios);
        drop(line);
        let left = left.into_iter().map(|id| self.memory.folios.adopt(id));
        let memory = &self.memory;
        memory.lru.put_back(&memory.folios, &mut left.collect(), ListKind::Inactive);
    }

    /// Why something cannot be written.
    pub(super) fn trouble(&self) -> Option<Arc<IoError>> {
        let refused_by_spill = || self.spill.as_ref()?.answers().last_refusal;
        self.flusher.trouble().or_else(refused_by_spill)
    }

    /// Does what the thread would do, if there is something and nobody is at it: for those who wait
    /// for the spill anyway, because their file is there. A wake-up less; where others want the
    /// processor that is most of the time. Nothing is in flight, and no turn held.
    pub(super) fn help_spiller(&self) {
        let Some(spill) = &self.spill else { return };
        let chosen = self.spiller.line.lock().begin_round();
        if let Some(chosen) = chosen {
            self.go_on_round(spill, chosen);
        }
    }

    fn go_on_round(&self, spill: &Spill, chosen: Vec<FolioId>) {
        // One round at a time; nothing is in flight.
        spill.set_storage_aside();
        let before = spill.answers();
        let pages = self.spill_round(chosen);
        let after = spill.answers();
        let (has_taken, has_refused) = (after.taken > before.taken, after.refused > before.refused);
        self.spiller.end_round(pages, has_taken, has_refused);
        self.flusher.note_freed();
    }

    /// P3 to P5; how many pages that were.
    fn spill_round(&self, chosen: Vec<FolioId>) -> u64 {
        let memory = &*self.memory;
        let mut pages = 0;
        let (mut in_arena, mut leaving) = (Vec::new(), ByFile::default());
        let (mut in_regions, mut inodes) = (Vec::new(), Vec::new());
        let awaited_rows = {
            let turn = self.take_turn();
            for id in chosen {
                let folio = memory.folios.adopt(id);
                pages += folio.folio().pages();
                // One without an owner was cut: its last reference goes here.
                let Some(inode) = turn.keep_owner(&folio) else { continue };
                if memory.arena.is_loose(id) {
                    in_regions.push(folio);
                    if !inodes.iter().any(|other| Arc::ptr_eq(other, &inode)) {
                        inodes.push(inode);
                    }
                } else {
                    if let Some(own) = folio.try_clone() {
                        leaving.add(inode, own);
                    }
                    in_arena.push(folio);
                }
            }
            let is_taken = !in_arena.is_empty() && !self.spiller.has_trouble_after(0);
            let pages_max = if is_taken { pages.max(super::ROUND_PAGES) } else { 0 };
            self.take_awaited_rows(&turn, pages_max, &mut leaving)
        };
        if !in_regions.is_empty() {
            let mut counts = ScanCounts::default();
            let how = How { second_chance: false, ..How::reclaim(WriteOut::MemoryFiles) };
            let mut unmapping = Unmapping::new(self, Owners::Kept(&inodes), how);
            in_regions.into_iter().for_each(|folio| unmapping.add(folio, &mut counts));
            unmapping.finish(&mut counts);
        }
        if !in_arena.is_empty() {
            leaving.write_out();
            self.evict_spilled(in_arena, awaited_rows);
        }
        pages
    }

    /// P5 for folios of the arena.
    fn evict_spilled(&self, folios: Vec<FolioRef<'_>>, awaited_rows: Vec<Row>) {
        let memory = &self.memory;
        memory.counters.add(Counter::PageOut, folios.len() as u64);
        let turn = self.take_turn();
        let (mut kept, mut evicted) = (Vec::new(), Vec::new());
        for folio in folios {
            let (id, pages) = (folio.id(), folio.folio().pages());
            let (verdict, folio) = self.evict_or_keep(&turn, folio, false);
            kept.extend(folio);
            if verdict == Verdict::Evicted {
                evicted.push((id, pages));
            }
        }
        memory.lru.put_back(&memory.folios, &mut kept, ListKind::Inactive);
        self.clear_rows(&turn, &evicted, &mut ScanCounts::default());
        self.clear_awaited_rows(&turn, awaited_rows);
    }
}

/// Folios of memory files that are about to be spilled, by their files, which are kept meanwhile.
#[derive(Debug, Default)]
pub(super) struct ByFile<'a>(Vec<(Arc<Inode>, Vec<FolioRef<'a>>)>);

impl<'a> ByFile<'a> {
    pub(super) fn add(&mut self, inode: Arc<Inode>, folio: FolioRef<'a>) {
        match self.0.iter_mut().find(|(other, _)| Arc::ptr_eq(other, &inode)) {
            Some((_, folios)) => folios.push(folio),
            None => self.0.push((inode, vec![folio])),
        }
    }

    /// P4: one batch for each file, one after the other. Errors are noted by the spill.
    fn write_out(self) {
        for (inode, folios) in self.0 {
            drop(inode.write_out_folios(folios));
        }
    }
}

/// The running thread; dropping it ends the thread and waits for it. It stays while a file is open.
#[derive(Debug)]
pub(crate) struct SpillThread {
    reclaim: Arc<Reclaim>,
    thread: OwnedThread,
}

impl SpillThread {
    /// Starts the thread, if there is a spill.
    pub(crate) fn start(reclaim: &Arc<Reclaim>) -> Result<Option<Self>> {
        let Some(spill) = reclaim.spill.clone() else { return Ok(None) };
        reclaim.spiller.line.lock().is_served = true;
        let shared = Arc::clone(reclaim);
        let thread = OwnedThread::start("bifolio-spill", move || shared.run_spiller(&spill));
        let thread = thread.map_err(ErrorKind::Thread)?;
        Ok(Some(Self { reclaim: Arc::clone(reclaim), thread }))
    }
}

impl Drop for SpillThread {
    fn drop(&mut self) {
        if !self.thread.is_left_behind() {
            self.reclaim.spiller.line.lock().is_ending = true;
            self.reclaim.spiller.called.notify_all();
        }
    }
}
