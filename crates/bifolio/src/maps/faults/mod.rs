//! Faults: accesses to pages of a region that are not present.
//!
//! A page that cannot be read is poisoned: an access raises SIGBUS, as with `mmap`, and the region
//! has the reason.
//!
//! A message may be served when its thread no longer waits and the page has changed;
//! `maps/region/stray_pages.rs` describes when an error still holds.
//!
//! A thread that serves a fault holds the file open. The faulting thread continues slightly
//! earlier: if it then drops the last map, the serving thread would close the file later, and write
//! its last bytes. So the drop of a map waits for the services that have started. The wait is
//! bounded, because a service may be waiting for something that the dropping thread holds.
//!
//! The table of regions covers all caches of the process, because the handler of a signal does not
//! know the cache.

mod handle_fault;
mod in_thread;
mod threads;

pub(crate) use in_thread::{check_signals, serve_in_thread};
pub(crate) use threads::FaultThreads;

use crate::error::Result;
use crate::file::Handle;
use crate::maps::region::{FaultRefusal, Region};
use crate::memory::{PageSpace, forget_addresses, note_addresses};
use crate::page::{PAGE_BYTES, PAGE_SHIFT};
use crate::stats::Counter;
use crate::sync::{Condvar, Mutex, Ordering, RwLock, Share, WeakList};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{io, thread};

#[derive(Debug)]
struct Served {
    region: Arc<Region>,
    threads: Share,
    services: Arc<RunningServices>,
    /// Handles of the region's file, the last one opened last.
    handles: WeakList<Handle>,
}

/// Attempts to poison a page while the kernel has no memory for it, and the pause between them: two
/// seconds in all.
const REFUSE_TRIES_MAX: u32 = 200;
const PAUSE: Duration = Duration::from_millis(10);

/// Upper bound on the wait of a map's drop: a longer service closes the file itself.
const WAIT_MAX: Duration = Duration::from_secs(1);

/// All regions, by the address of their first byte.
static REGIONS: RwLock<BTreeMap<usize, Served>> = RwLock::new(BTreeMap::new());

/// Restores the `pages` of a file in a region that have folios, and were discarded by the program.
pub(super) fn restore(handle: &Handle, pages: Range<u64>) -> Result<()> {
    let Some(region) = Region::of(&handle.inode.page_space) else { return Ok(()) };
    handle.handle_fault(region, pages, false).map_err(|(_, error)| error)
}

/// Serves faults of a file in a region through `handle`, too.
pub(super) fn enlist(handle: &Arc<Handle>) {
    let Some(region) = Region::shared_of(&handle.inode.page_space) else { return };
    let mut regions = REGIONS.write();
    let start = region.addresses.base().addr();
    note_addresses(start..start + region.addresses.len_bytes());
    let served = regions.entry(start).or_insert_with(|| Served {
        region,
        threads: handle.inode.load.faults.clone(),
        services: Arc::default(),
        handles: WeakList::default(),
    });
    served.handles.push(Arc::downgrade(handle));
}

pub(super) fn forget(page_space: &PageSpace) {
    let Some(region) = Region::of(page_space) else { return };
    let start = region.addresses.base().addr();
    let mut regions = REGIONS.write();
    // Dropped after the lock: this may be the last reference to the region.
    let forgotten = regions.remove(&start);
    forget_addresses(start);
    drop(regions);
    drop(forgotten);
}

pub(crate) fn services_in(region: &Region) -> Option<Arc<RunningServices>> {
    REGIONS.read().get(&region.addresses.base().addr()).map(|served| Arc::clone(&served.services))
}

/// Region and handle that serve a fault. The order of the fields is that of their drops: the
/// service ends after the file reference is dropped.
#[derive(Debug)]
struct FaultServer {
    handle: Arc<Handle>,
    region: Arc<Region>,
    _service: Service,
}

/// Returns the threads of the device that faults at `address` wait for, or `None` if the address is
/// in no open file.
fn threads_for(address: usize) -> Option<Share> {
    at(&REGIONS.read(), address).map(|served| served.threads.clone())
}

fn server_of(address: usize) -> Option<FaultServer> {
    let regions = REGIONS.read();
    let served = at(&regions, address)?;
    let service = served.services.begin();
    let handle = served.handles.last()?;
    Some(FaultServer { handle, region: Arc::clone(&served.region), _service: service })
}

fn at(regions: &BTreeMap<usize, Served>, address: usize) -> Option<&Served> {
    let (base, served) = regions.range(..=address).next_back()?;
    (address - base < served.region.addresses.len_bytes()).then_some(served)
}

impl FaultServer {
    fn pages_at(&self, address: usize, length_bytes: usize) -> Range<u64> {
        let offset = (address - self.region.addresses.base().addr()) as u64;
        offset >> PAGE_SHIFT..((offset + length_bytes as u64 - 1) >> PAGE_SHIFT) + 1
    }

    /// Fills `pages` for the threads that have faulted there. A page that cannot be filled is
    /// refused, and those after it are tried. `read_at` is the time when the messages were read.
    fn serve(&self, pages: Range<u64>, is_write: bool, read_at: u64) {
        self.handle.inode.memory.counters.add(Counter::Fault, 1);
        let mut left = pages;
        while left.start < left.end {
            // Poisoned by another service, which has reported it: no thread waits.
            if self.region.stray_pages.is_poisoned_since(left.start, read_at) {
                left.start += 1;
                continue;
            }
            // STRAY-R1.
            let growths = self.region.stray_pages.growths();
            let served = self.handle.handle_fault(&self.region, left.clone(), is_write);
            let Err((index, error)) = served else { return };
            self.refuse(&FaultRefusal { index, growths, read_at, error });
            left.start = index + 1;
        }
    }

    /// Handles a page that cannot be filled: if the error still holds, poisons the page, so that an
    /// access raises SIGBUS and no thread waits for it. Retries for a while if the kernel has no
    /// memory for this; then poisons the cache.
    fn refuse(&self, refusal: &FaultRefusal) {
        let (index, mapping) = (refusal.index, &self.handle.inode.mapping);
        let is_past_end = || index * PAGE_BYTES >= mapping.len_bytes();
        let is_there = || mapping.table().load(index, Ordering::Relaxed).is_ready();
        let Region { stray_pages, addresses, .. } = &*self.region;
        for _ in 0..REFUSE_TRIES_MAX {
            match stray_pages.refuse(addresses, refusal, is_past_end, is_there) {
                Err(error) if error.kind() == io::ErrorKind::OutOfMemory => thread::sleep(PAUSE),
                Err(error) => return self.lose("a page of a map cannot be poisoned", &error),
                Ok(_) => return,
            }
        }
        self.lose("a page of a map cannot be poisoned", &io::ErrorKind::OutOfMemory.into());
    }

    fn wake(&self, pages: &Range<u64>) {
        let addresses = &self.region.addresses;
        if let Err(error) = addresses.userfault.wake(&addresses.range_of(pages)) {
            self.lose("threads that wait for a page of a map cannot be woken", &error);
        }
    }

    fn lose(&self, what: &'static str, error: &io::Error) {
        self.region.addresses.regions.soundness.lose(what, error);
    }
}

/// Services of the faults of a region that are in progress.
#[derive(Debug, Default)]
pub(crate) struct RunningServices {
    state: Mutex<ServicesState>,
    ended: Condvar,
}

#[derive(Debug, Default)]
struct ServicesState {
    begun: u64,
    running: Vec<u64>,
}

#[derive(Debug)]
struct Service {
    services: Arc<RunningServices>,
    number: u64,
}

impl RunningServices {
    fn begin(self: &Arc<Self>) -> Service {
        let mut state = self.state.lock();
        state.begun += 1;
        let number = state.begun;
        state.running.push(number);
        Service { services: Arc::clone(self), number }
    }

    /// Waits until all services that have started are done, at most for a second.
    pub(crate) fn wait_for_begun(&self) {
        let mut state = self.state.lock();
        let (begun, until) = (state.begun, Instant::now() + WAIT_MAX);
        while state.running.iter().any(|number| *number <= begun) {
            if self.ended.wait_until(&mut state, until).timed_out() {
                return;
            }
        }
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        self.services.state.lock().running.retain(|number| *number != self.number);
        self.services.ended.notify_all();
    }
}

/// Logs the refused fault of a thread inside a call, which would deadlock with the thread that
/// serves the fault.
fn log_inside(address: usize, thread: u32) {
    log::error!(
        "thread {thread} touched a page of a map at {address:#x} that is not resident, while \
         inside a call of the cache that holds a lock or a transfer: a signal handler must not \
         touch maps, and pages of a map must not be thrown away (madvise) or unmapped; SIGBUS"
    );
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::cache::Cache;
    use crate::file::OpenOptions;
    use crate::maps::region::fault_time;

    /// STRAY-R3, each condition alone.
    #[test]
    fn a_refusal_is_judged_by_how_the_page_is_by_then() {
        let cache = Cache::builder().memory(1 << 20).build().unwrap();
        let options = OpenOptions::new().read(true).write(true).mappable(true);
        let Ok(file) = cache.memory_file_with("grows", &options) else { return };
        file.set_len(PAGE_BYTES).unwrap();
        let region = Region::of(&file.handle.inode.page_space).unwrap();
        let refusal_now = || {
            let error = file.handle.inode.past_end(PAGE_BYTES, 1);
            FaultRefusal {
                index: 1,
                growths: region.stray_pages.growths(),
                read_at: fault_time(),
                error,
            }
        };
        let stands = |refusal: &FaultRefusal, is_there| {
            region.stray_pages.refuse(&region.addresses, refusal, || false, || is_there).unwrap()
        };
        region.stray_pages.begin_growth(&region.addresses, 1..2).unwrap();
        let of_growth = refusal_now();
        assert!(!stands(&of_growth, false), "the file is about to grow over the page");
        region.stray_pages.end_growth();
        assert!(!stands(&of_growth, false), "the file has grown since");
        let refusal = refusal_now();
        assert!(!stands(&refusal, true), "the page is present");
        assert!(stands(&refusal, false));
    }
}
