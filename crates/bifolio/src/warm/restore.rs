//! Restoring: a thread that reads the pages of a list, the hottest first, while their files are
//! open.
//!
//! The thread has a queue of runs, and while some are in flight it waits for nothing else (IO-5):
//! it claims pages without a wait for memory, of one file at a time, as a visitor of that file. It
//! ends when nothing of the list is left, when no frame is free, when it is cancelled, and with the
//! cache. It holds no reference to the registry but for the time of a visit.
//!
//! A run is tried once: what was not read of it because the file was closed is left for the next
//! open, and what another thread reads at the moment, or the device refuses, is not tried again.

use super::list::{self, COLDNESSES, List, ListedFile, Runs, USED_COLDNESSES};
use super::save::open_list;
use crate::error::{Error, ErrorKind, Result, io_error};
use crate::file::{OpenObserver, Registry, Visit};
use crate::fill::{FillQueue, ReadIoClaim, Wait};
use crate::inode::Inode;
use crate::io::{Engine, FileIdentity};
use crate::memory::Memory;
use crate::page::{LockedFolio, PAGE_BYTES};
use crate::sync::{Condvar, Mutex, MutexGuard, Ordering, blocking};
use crate::sys::process::{Origin, OwnedThread};
use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::io::Read;
use std::path::Path;
use std::sync::{Arc, Weak};
use std::time::Duration;

/// Part of the bound that a list may have, whose runs of single pages take 3 bytes each; and the
/// least that it may have, bytes.
const LIST_DIVISOR: u64 = 256;
const LIST_BYTES_MIN: u64 = 64 << 10;
/// Upper bound on the bytes in flight, as a part of the bound, and as a number.
const IN_FLIGHT_DIVISOR: u64 = 16;
const IN_FLIGHT_BYTES_MAX: u64 = 8 << 20;
/// Pause, and number of consecutive pauses, while other calls have all of a device's share of
/// reads.
const PAUSE: Duration = Duration::from_millis(5);
const PAUSES_MAX: u32 = 20;

/// How far a restore of hot pages is ([`HotRestore::progress`]).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct RestoreProgress {
    /// Files of the list.
    pub files: u64,
    /// Of these, files that were open, or were opened since.
    pub files_found: u64,
    /// Pages of the list, bytes.
    pub listed_bytes: u64,
    /// Pages read so far, bytes.
    pub read_bytes: u64,
    /// Pages that were in memory already, bytes.
    pub resident_bytes: u64,
    /// Set if the list is damaged, or longer than this cache can hold: a part of it was left out.
    pub is_cut: bool,
    /// Set if the restore has ended because no memory was free: the rest was left out.
    pub is_full: bool,
    /// Set if the restore has ended: nothing more is read.
    pub is_over: bool,
}

/// A restore of hot pages, in the background ([`Cache::restore_hot`](crate::Cache::restore_hot)).
///
/// All methods may be called by any thread. A drop ends nothing.
#[derive(Debug)]
pub struct HotRestore {
    restoring: Arc<Restoring>,
}

impl HotRestore {
    /// Returns how far it is. Never waits.
    pub fn progress(&self) -> RestoreProgress {
        if self.restoring.origin.is_forked() {
            return RestoreProgress { is_over: true, ..RestoreProgress::default() };
        }
        self.restoring.state.lock().progress
    }

    /// Waits until nothing of the list is left to read for the files that are open now. Blocks for
    /// their devices.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let (table, hot) = (directory.path().join("table"), directory.path().join("hot"));
    /// # std::fs::write(&table, vec![7; 100_000])?;
    /// # use bifolio::{Cache, OpenOptions};
    /// # let before = Cache::builder().memory(4 << 20).build()?;
    /// # let file = before.open(&table, &OpenOptions::new())?;
    /// # file.read_exact_at(&mut [0; 100], 5000)?;
    /// # before.save_hot(&hot)?;
    /// let cache = Cache::builder().memory(4 << 20).build()?;
    /// let restore = cache.restore_hot(&hot)?;
    /// let file = cache.open(&table, &OpenOptions::new())?;
    /// assert_eq!(restore.wait().read_bytes, 4096);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn wait(&self) -> RestoreProgress {
        if self.restoring.origin.is_forked() {
            return self.progress();
        }
        let mut state = self.restoring.state.lock();
        while !state.is_idle && !state.progress.is_over {
            self.restoring.changed.wait(&mut state);
        }
        state.progress
    }

    /// Ends it: no further page is read. Does not wait for the reads in flight.
    pub fn cancel(&self) {
        if !self.restoring.origin.is_forked() {
            self.restoring.note_end();
        }
    }
}

#[derive(Debug)]
struct Restoring {
    registry: Weak<Registry>,
    memory: Arc<Memory>,
    origin: Origin,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// By their numbers in the list.
    files: HashMap<usize, Planned>,
    /// Files by the number of their inode.
    by_inode: HashMap<u64, Vec<usize>>,
    /// Files that have been opened, and may be in the list.
    opened: HashSet<FileIdentity>,
    /// Coldness and number of the runs of open files that are left: the next ones first.
    ready: BTreeSet<(usize, usize)>,
    progress: RestoreProgress,
    /// Runs that are not done.
    runs_left: usize,
    is_cancelled: bool,
    /// Set while there is nothing to do before another file is opened.
    is_idle: bool,
}

#[derive(Debug)]
struct Planned {
    listed: ListedFile,
    /// The open file that it is.
    found: Option<FileIdentity>,
    was_found: bool,
    runs: [VecDeque<Runs>; COLDNESSES],
}

/// Starts to read the pages of the list at `path`.
pub(crate) fn restore(
    registry: &Arc<Registry>,
    engine: &Arc<Engine>,
    path: &Path,
) -> Result<HotRestore> {
    registry.check()?;
    let memory = Arc::clone(&registry.reclaim.memory);
    let bound_bytes = memory.arena.bound_bytes();
    let (bytes, is_longer) = read_list(path, LIST_BYTES_MIN.max(bound_bytes / LIST_DIVISOR))?;
    let mut list = List::of(&bytes, bound_bytes / PAGE_BYTES).ok_or_else(|| {
        let problem = "it is no list of hot pages, or has the form of another version";
        Error::config("list of hot pages", problem).in_file(path.display().to_string())
    })?;
    list.is_cut |= is_longer;
    let restoring = Arc::new(Restoring {
        registry: Arc::downgrade(registry),
        memory,
        origin: Origin::here(),
        state: Mutex::new(State::of(list)),
        changed: Condvar::new(),
    });
    let observer: Arc<dyn OpenObserver> = Arc::clone(&restoring) as _;
    // In this order: no open is missed.
    registry.observe(&observer);
    registry.identities().into_iter().for_each(|identity| restoring.note_open(identity));
    let (shared, engine) = (Arc::clone(&restoring), Arc::clone(engine));
    let thread = OwnedThread::start("bifolio-warm", move || shared.run(&engine));
    // Its end is not waited for: it may be in a transfer that its device does not answer.
    thread.map_err(Error::thread)?.detach();
    Ok(HotRestore { restoring })
}

/// Reads up to `bytes_max` bytes of a list. Returns `true` beside them if it has more.
fn read_list(path: &Path, bytes_max: u64) -> Result<(Vec<u8>, bool)> {
    let mut bytes = Vec::new();
    let read = open_list(path)?.take(bytes_max + 1).read_to_end(&mut bytes);
    read.map_err(|source| io_error(path.display().to_string(), "read", None, source))?;
    let is_longer = bytes.len() as u64 > bytes_max;
    bytes.truncate(bytes_max as usize);
    Ok((bytes, is_longer))
}

impl State {
    fn of(list: List) -> Self {
        let mut state = Self::default();
        let progress = &mut state.progress;
        progress.is_cut = list.is_cut;
        progress.files = list.files.len() as u64;
        for (number, listed) in list.files {
            let (_, inode) = listed.identity.numbers();
            state.by_inode.entry(inode).or_default().push(number);
            let planned =
                Planned { listed, found: None, was_found: false, runs: Default::default() };
            state.files.insert(number, planned);
        }
        for runs in list.runs {
            let Some(file) = state.files.get_mut(&runs.file) else { continue };
            state.progress.listed_bytes += runs.pages * PAGE_BYTES;
            state.runs_left += 1;
            file.runs[runs.coldness].push_back(runs);
        }
        state
    }

    /// Takes the hottest runs of the open files, and says which file they are of.
    fn take(&mut self) -> Option<(FileIdentity, Runs)> {
        while let Some((coldness, number)) = self.ready.first().copied() {
            let file = self.files.get_mut(&number);
            let taken = file.and_then(|file| {
                let runs = &mut file.runs[coldness];
                Some((file.found?, runs.pop_front()?, runs.is_empty()))
            });
            match taken {
                Some((identity, runs, is_last)) => {
                    if is_last {
                        self.ready.remove(&(coldness, number));
                    }
                    return Some((identity, runs));
                }
                None => self.ready.remove(&(coldness, number)),
            };
        }
        None
    }

    /// Leaves runs of a file that was closed for its next open.
    fn put_back(&mut self, runs: Runs) {
        let Some(file) = self.files.get_mut(&runs.file) else { return };
        file.found = None;
        self.ready.retain(|(_, number)| *number != runs.file);
        file.runs[runs.coldness].push_front(runs);
    }

    /// Finds an open file in the list.
    fn match_open(&mut self, open: &ListedFile) {
        let (_, inode) = open.identity.numbers();
        for number in self.by_inode.get(&inode).into_iter().flatten() {
            let Some(file) = self.files.get_mut(number) else { continue };
            if !file.listed.is(open) {
                continue;
            }
            file.found = Some(open.identity);
            self.progress.files_found += u64::from(!std::mem::replace(&mut file.was_found, true));
            let left = (0..COLDNESSES).filter(|coldness| !file.runs[*coldness].is_empty());
            self.ready.extend(left.map(|coldness| (coldness, *number)));
        }
    }
}

/// Next step of the thread.
#[derive(Debug)]
enum Step {
    Look(FileIdentity),
    Read(FileIdentity, Runs),
}

/// Why the thread no longer reads some runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    /// More may be in flight.
    GoesOn,
    Done,
    /// The file is not open.
    Closed,
    /// A share of something that others have.
    Busy,
    /// No frame is free.
    Full,
    /// The cache cannot be used any more.
    Ended,
}

impl OpenObserver for Restoring {
    fn note_open(&self, identity: FileIdentity) {
        let mut state = self.state.lock();
        let (_, inode) = identity.numbers();
        if !state.progress.is_over && state.by_inode.contains_key(&inode) {
            state.opened.insert(identity);
            state.is_idle = false;
            self.changed.notify_all();
        }
    }

    fn note_end(&self) {
        self.state.lock().is_cancelled = true;
        self.changed.notify_all();
    }
}

impl Restoring {
    fn run(&self, engine: &Engine) {
        let _over = Over(self);
        let serving = blocking::serve();
        let mut reads = Reads::new(self, engine);
        while let Some(step) = self.next(&mut reads) {
            match step {
                Step::Look(identity) => {
                    self.with_registry(&mut reads, |registry, _| {
                        let Some(visit) = registry.visit(identity) else { return };
                        let born_ns = visit.born_ns().unwrap_or(0);
                        let name = list::name_of(&visit.inode.name()).to_owned();
                        let open = ListedFile { identity, born_ns, name };
                        self.state.lock().match_open(&open);
                    });
                }
                Step::Read(identity, runs) => match self.read(&mut reads, identity, runs) {
                    (Outcome::Closed, runs) => self.state.lock().put_back(runs),
                    (Outcome::Done, _) => self.state.lock().runs_left -= 1,
                    (outcome, _) => {
                        self.state.lock().progress.is_full = outcome == Outcome::Full;
                        break;
                    }
                },
            }
        }
        reads.drain();
        let last = reads.last.take();
        drop((reads, serving));
        // Files that could not be written are tried once more.
        drop(last);
    }

    /// Returns the next step; `None` at the end. Waits for an open if there is nothing else to do.
    fn next(&self, reads: &mut Reads<'_>) -> Option<Step> {
        loop {
            let mut state = self.state.lock();
            if state.is_cancelled || state.runs_left == 0 {
                return None;
            }
            if let Some(identity) = state.opened.iter().next().copied() {
                state.opened.remove(&identity);
                return Some(Step::Look(identity));
            }
            if let Some((identity, runs)) = state.take() {
                return Some(Step::Read(identity, runs));
            }
            if reads.queue.runs() > 0 {
                drop(state);
                reads.drain();
                continue;
            }
            state.is_idle = true;
            self.changed.notify_all();
            self.changed.wait(&mut state);
        }
    }

    /// Calls `work` with the registry, if that still exists.
    fn with_registry<'e, R>(
        &self,
        reads: &mut Reads<'e>,
        work: impl FnOnce(&Registry, &mut Reads<'e>) -> R,
    ) -> Option<R> {
        let registry = self.registry.upgrade()?;
        let result = work(&registry, reads);
        // Its drop may wait for the pages in flight.
        reads.last = Arc::into_inner(registry);
        Some(result)
    }

    /// Reads the pages of some runs that are not in memory. Returns what is left of them.
    fn read(
        &self,
        reads: &mut Reads<'_>,
        identity: FileIdentity,
        mut runs: Runs,
    ) -> (Outcome, Runs) {
        let mut pauses = 0;
        loop {
            if self.state.lock().is_cancelled {
                return (Outcome::Ended, runs);
            }
            reads.make_room();
            let before = reads.queue.runs();
            let outcome = self.with_registry(reads, |registry, reads| {
                let Some(visit) = registry.visit(identity) else { return Outcome::Closed };
                reads.claim_some(&visit, registry, &mut runs)
            });
            if reads.queue.runs() > before {
                pauses = 0;
                reads.queue.transfers.begin();
            }
            match outcome.unwrap_or(Outcome::Ended) {
                Outcome::GoesOn => {}
                Outcome::Busy if reads.queue.runs() > 0 => reads.wait(),
                Outcome::Busy if pauses < PAUSES_MAX => {
                    pauses += 1;
                    std::thread::sleep(PAUSE);
                }
                // The class of the file is at its ceiling, for example.
                Outcome::Busy => return (Outcome::Done, runs),
                outcome => return (outcome, runs),
            }
        }
    }
}

/// Says that the thread has ended, even if by a panic.
#[derive(Debug)]
struct Over<'r>(&'r Restoring);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        let left = {
            let mut state = self.0.state.lock();
            state.progress.is_over = true;
            state.ready.clear();
            std::mem::take(&mut state.files)
        };
        self.0.changed.notify_all();
        drop(left);
    }
}

/// The pages in flight.
#[derive(Debug)]
struct Reads<'e> {
    restoring: &'e Restoring,
    /// Runs, each with `true` if its pages are marked as used.
    queue: FillQueue<'e, bool>,
    runs_max: usize,
    pages_max: u64,
    /// The registry, if this thread has dropped the last reference to it.
    last: Option<Registry>,
}

impl<'e> Reads<'e> {
    fn new(restoring: &'e Restoring, engine: &'e Engine) -> Self {
        let queue = FillQueue::new(engine);
        let runs_max = (queue.transfers.depth() / 2).max(1);
        let bound_bytes = restoring.memory.arena.bound_bytes();
        let bytes_max = IN_FLIGHT_BYTES_MAX.min(bound_bytes / IN_FLIGHT_DIVISOR);
        Self { restoring, queue, runs_max, pages_max: (bytes_max / PAGE_BYTES).max(1), last: None }
    }

    fn progress(&self) -> MutexGuard<'_, State> {
        self.restoring.state.lock()
    }

    fn is_full(&self) -> bool {
        self.queue.runs() >= self.runs_max || self.queue.pages >= self.pages_max
    }

    /// Waits until more may be in flight.
    fn make_room(&mut self) {
        while self.is_full() {
            self.wait();
        }
    }

    fn drain(&mut self) {
        while self.queue.runs() > 0 {
            self.wait();
        }
    }

    /// Waits for a transfer, and publishes those that have ended.
    fn wait(&mut self) {
        if self.queue.ended.is_empty() {
            self.queue.wait();
        }
        let mut pages = 0;
        while let Some(ended) = self.queue.ended.pop_front() {
            let (inode, was_used) = (Arc::clone(&ended.run.inode), ended.note);
            // A page that cannot be read is left to the reads that need it.
            let _ = ended.publish(&self.restoring.memory.folios, |locked| {
                pages += locked.lock.pages();
                if was_used {
                    mark_used(&inode, &locked.lock);
                }
            });
        }
        self.progress().progress.read_bytes += pages * PAGE_BYTES;
    }

    /// Claims pages of a file that are not in memory, and queues them.
    fn claim_some(&mut self, visit: &Visit<'_>, registry: &Registry, runs: &mut Runs) -> Outcome {
        let (inode, was_used) = (&visit.inode, runs.coldness < USED_COLDNESSES);
        let pages_max = inode.page_space.pages_in_flight(self.pages_max);
        let end_page = inode.mapping.len_bytes().div_ceil(PAGE_BYTES);
        let mut resident_pages = 0;
        let outcome = loop {
            if self.is_full() || self.queue.pages >= pages_max && self.queue.runs() > 0 {
                break Outcome::GoesOn;
            }
            let Some(left) = runs.current() else { break Outcome::Done };
            left.end = left.end.min(end_page).max(left.start);
            if left.is_empty() {
                continue;
            }
            let start = left.start;
            let mut part = start..left.end.min(start + registry.reclaim.spare_pages());
            if part.end < inode.mapping.end_of_unit(start).min(left.end) {
                break Outcome::Full;
            }
            let claimed = visit.fill().claim_next(&mut part, Wait::NeverNorEvict);
            left.start = part.start.min(left.end);
            match claimed {
                Ok(ReadIoClaim::New(run)) => {
                    resident_pages += run.first.saturating_sub(start);
                    self.queue.add(run, was_used);
                }
                Ok(ReadIoClaim::Taken) => {
                    resident_pages += part.end - start;
                    left.start = part.end;
                }
                Ok(ReadIoClaim::NoFrame) => break Outcome::Busy,
                Err(error) if error.kind() == ErrorKind::Memory => break Outcome::Full,
                Err(_) => break Outcome::Ended,
            }
        };
        self.progress().progress.resident_bytes += resident_pages * PAGE_BYTES;
        outcome
    }
}

/// Marks the pages of a folio that is READY as a read does.
fn mark_used(inode: &Inode, locked: &LockedFolio<'_>) {
    let table = inode.mapping.table();
    for page in locked.index()..locked.index() + locked.pages() {
        // Relaxed: a hint.
        let _marked = table.mark_referenced(page, table.load(page, Ordering::Relaxed));
    }
}
