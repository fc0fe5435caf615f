//! Faults: somebody touches a page of a region that is not there.
//!
//! The kernel tells of it, a thread of ours (`threads.rs`) or the signal handler of the thread
//! itself asks [`Server::serve`], and the page comes by the same way as for a read
//! (`file/fill.rs`). A page that cannot be read is poisoned: whoever touches it gets SIGBUS, as
//! with `mmap`; why, is told by the region ([`Region::error_since`]).
//!
//! ```text
//!   touch --> kernel --> message --> threads.rs --.
//!               |                                 +--> serve --> Handle::handle_fault --> fill.rs
//!               '------> SIGBUS, in the thread  --'       |            '--> readahead
//!                                                         '--> failed: judge again, and if it is
//!                                                              so, note it, poison the page
//! ```
//!
//! A message may be served when nobody waits any more, and the page is another one: the head of
//! `memory/region/leftovers.rs` says how a refusal is judged.
//!
//! Which region an address is in is known here, for all caches of the process, because a signal
//! handler has nothing else to go by.

mod handle_fault;
mod threads;
mod underway;

pub(super) use threads::FaultThreads;
pub(super) use underway::Underway;

use super::handle::Handle;
use crate::memory::{PageSpace, Refusal, Region};
use crate::page::{PAGE_BYTES, PAGE_SHIFT};
use crate::stats::Counter;
use crate::sync::{Ordering, RwLock, RwLockReadGuard, Share, WeakList, blocking, inside};
use crate::sys::process::current_thread;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;
use std::{io, thread};
use underway::Service;

/// A region, and who can fill it.
#[derive(Debug)]
struct Served {
    region: Arc<Region>,
    /// The threads of its device.
    threads: Share,
    underway: Arc<Underway>,
    /// The handles of its file, the last one opened last.
    handles: WeakList<Handle>,
}

/// How often a page is refused that the kernel has no memory to mark, and how long it is left alone
/// between: two seconds together.
const REFUSE_TRIES_MAX: u32 = 200;
const PAUSE: Duration = Duration::from_millis(10);

/// All regions, by the address of their first byte.
static REGIONS: RwLock<BTreeMap<usize, Served>> = RwLock::new(BTreeMap::new());

/// How many regions there are, for those who need not look further.
static REGIONS_COUNT: AtomicUsize = AtomicUsize::new(0);

/// Whether any of these bytes lie in a region: to touch them may be a fault, which takes folio
/// locks and waits. So nobody touches them with a folio lock in his hand.
pub(super) fn is_mapped(bytes: &[u8]) -> bool {
    // Relaxed: who has an address in a region was given it after it was counted.
    if REGIONS_COUNT.load(Ordering::Relaxed) == 0 {
        return false;
    }
    let (start, end) = (bytes.as_ptr().addr(), bytes.as_ptr().addr() + bytes.len());
    let regions = REGIONS.read();
    let last = regions.range(..end).next_back();
    last.is_some_and(|(base, served)| start < base + served.region.len_bytes())
}

/// Lets faults of a file that can be mapped be served through `handle`, too.
pub(super) fn enlist(handle: &Arc<Handle>) {
    let Some(region) = handle.inode.page_space.region() else { return };
    let mut regions = REGIONS.write();
    let served = regions.entry(region.base().addr()).or_insert_with(|| Served {
        region: Arc::clone(region),
        threads: handle.inode.load.faults.clone(),
        underway: Arc::default(),
        handles: WeakList::default(),
    });
    served.handles.push(Arc::downgrade(handle));
    REGIONS_COUNT.store(regions.len(), Ordering::Relaxed);
}

/// No fault of the file is served any more: it is closed.
pub(super) fn forget(page_space: &PageSpace) {
    let Some(region) = page_space.region() else { return };
    let forgotten = {
        let mut regions = REGIONS.write();
        let forgotten = regions.remove(&region.base().addr());
        REGIONS_COUNT.store(regions.len(), Ordering::Relaxed);
        forgotten
    };
    // Not under the lock: it may be the last to have the region.
    drop(forgotten);
}

/// Who is at work for the faults of a region that is enlisted.
pub(super) fn underway_in(region: &Region) -> Option<Arc<Underway>> {
    REGIONS.read().get(&region.base().addr()).map(|served| Arc::clone(&served.underway))
}

/// Who serves faults at an address. Fields in the order of their drops: the service ends when the
/// file is not held open any more.
#[derive(Debug)]
struct Server {
    handle: Arc<Handle>,
    region: Arc<Region>,
    _service: Service,
}

/// The threads of the device that faults at `address` wait for; `None`: it is in no open file.
fn threads_for(address: usize) -> Option<Share> {
    let regions: RwLockReadGuard<'_, _> = REGIONS.read();
    let (base, served) = regions.range(..=address).next_back()?;
    (address - base < served.region.len_bytes()).then(|| served.threads.clone())
}

/// Who can serve faults at `address`.
fn server_of(address: usize) -> Option<Server> {
    let regions: RwLockReadGuard<'_, _> = REGIONS.read();
    let (base, served) = regions.range(..=address).next_back()?;
    if address - base >= served.region.len_bytes() {
        return None;
    }
    let service = served.underway.begin();
    let handle = served.handles.last()?;
    Some(Server { handle, region: Arc::clone(&served.region), _service: service })
}

impl Server {
    /// The pages from `address` on, so many bytes.
    fn pages_at(&self, address: usize, length_bytes: usize) -> Range<u64> {
        let offset = (address - self.region.base().addr()) as u64;
        offset >> PAGE_SHIFT..((offset + length_bytes as u64 - 1) >> PAGE_SHIFT) + 1
    }

    /// Serves faults at `pages`, of which a message was read at `read_at`; whether whoever raised
    /// them can go on.
    fn serve(&self, pages: Range<u64>, is_write: bool, read_at: u64) -> bool {
        self.handle.inode.memory.counters.add(Counter::Fault, 1);
        let mut left = pages;
        let mut is_served = true;
        while left.start < left.end {
            // Refused by another service, which has told of it: nobody waits.
            if self.region.is_poisoned_since(left.start, read_at) {
                (is_served, left.start) = (false, left.start + 1);
                continue;
            }
            // R1 of `memory/region/leftovers.rs`.
            let growths = self.region.growths();
            let Err((index, error)) = self.handle.handle_fault(left.clone(), is_write) else {
                break;
            };
            let error = Arc::new(error);
            is_served &= !self.refuse(&Refusal { index, growths, read_at, error });
            left.start = index + 1;
        }
        is_served
    }

    /// A page cannot be had: if that is still so, whoever touches it is to know, and nobody is to
    /// wait for it. Whether it is. Where the kernel has no memory to note it, tries again for a
    /// while; then the cache is poisoned.
    fn refuse(&self, refusal: &Refusal) -> bool {
        let (index, mapping) = (refusal.index, &self.handle.inode.mapping);
        let is_past_end = || index * PAGE_BYTES >= mapping.len_bytes();
        let is_there = || mapping.table().load(index, Ordering::Relaxed).is_ready();
        for _ in 0..REFUSE_TRIES_MAX {
            match self.region.refuse(refusal, is_past_end, is_there) {
                Err(error) if error.kind() == io::ErrorKind::OutOfMemory => thread::sleep(PAUSE),
                Err(error) => return self.lose("a page of a map cannot be refused", &error),
                Ok(is_refused) => return is_refused,
            }
        }
        self.lose("a page of a map cannot be refused", &io::ErrorKind::OutOfMemory.into())
    }

    /// Wakes whoever waits for pages that were there already.
    fn wake(&self, pages: &Range<u64>) {
        if let Err(error) = self.region.userfault.wake(&self.region.range_of(pages)) {
            self.lose("those who wait for a page of a map cannot be woken", &error);
        }
    }

    fn lose(&self, what: &'static str, error: &io::Error) -> bool {
        self.region.regions.soundness.lose(what, error);
        true
    }
}

/// A fault of a thread inside a call is refused: whoever serves it would wait for the thread.
fn log_inside(address: usize, thread: u32) {
    log::error!(
        "thread {thread} touched a page of a map at {address:#x} that is not resident, while \
         inside a call of the cache that holds a lock or a transfer: a signal handler must not \
         touch maps, and pages of a map must not be thrown away (madvise) or unmapped; SIGBUS"
    );
}

/// Serves the fault of the thread itself, in its signal handler.
pub(super) fn serve_in_thread(address: usize, is_write: bool) -> bool {
    if inside::is_this_thread() {
        if threads_for(address).is_some() {
            log_inside(address, current_thread());
        }
        return false;
    }
    let Some(server) = server_of(address) else { return false };
    let _serving = blocking::serve();
    let pages = server.pages_at(address, 1);
    // Nobody has to be asked whether he waits: it is this thread.
    server.serve(pages, is_write, u64::MAX)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::cache::Cache;
    use crate::file::OpenOptions;
    use crate::memory::fault_time;

    /// R3 of `memory/region/leftovers.rs`, each part by itself.
    #[test]
    fn a_refusal_is_judged_by_how_the_page_is_by_then() {
        let cache = Cache::builder().memory(1 << 20).build().unwrap();
        let options = OpenOptions::new().read(true).write(true).mappable(true);
        let Ok(file) = cache.memory_file_with("grows", &options) else { return };
        file.set_len(PAGE_BYTES).unwrap();
        let page_space = &file.handle.inode.page_space;
        let region = page_space.region().unwrap();
        let refusal_now = || {
            let error = Arc::new(file.handle.past_end(PAGE_BYTES, 1));
            Refusal { index: 1, growths: region.growths(), read_at: fault_time(), error }
        };
        let stands =
            |refusal: &Refusal, is_there| region.refuse(refusal, || false, || is_there).unwrap();
        page_space.begin_growth(PAGE_BYTES, 2 * PAGE_BYTES).unwrap();
        let of_growth = refusal_now();
        assert!(!stands(&of_growth, false), "the page is about to be the file's");
        page_space.end_growth();
        assert!(!stands(&of_growth, false), "the file has grown since");
        let refusal = refusal_now();
        assert!(!stands(&refusal, true), "the page is there");
        assert!(stands(&refusal, false));
    }
}
