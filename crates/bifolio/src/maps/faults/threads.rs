//! Threads that serve faults.
//!
//! A fault may wait for its device forever. So a device has at most [`DEVICE_THREADS_MAX`] threads,
//! and fewer if other devices use most of them ([`Share`]). Further faults of the device are
//! *postponed*, and served by those threads one after the other. Before a thread serves a fault, it
//! makes sure that another one reads messages. More threads than the initial ones are started only
//! while all of those serve, and stay.
//!
//! PROTOCOL SERVE, as two columns:
//!
//! ```text
//!  A THREAD THAT SERVES                         A THREAD THAT HAS A MESSAGE
//!  P1 serve                                     Q1 lock `postponed`
//!  P2 lock `postponed`                          Q2 may the device have one more thread? then this
//!  P3 one of its device? take it, unlock, P1      is one: unlock, serve
//!  P4 none: the device has one thread less.     Q3 else into `postponed`; unlock
//!     A request whose device may have one
//!     more? count it, take it, unlock, P1
//!  P5 none: unlock
//! ```
//!
//! A request is postponed at Q3 only while threads serve: threads of its device, or as many as
//! allowed in all. Each of them reaches P3 and P4 when it has served.
//!
//! A fault of a thread that holds what the service may wait for (`sync/blocking.rs`) must be
//! refused. But a message can be late: another thread has filled the page meanwhile, and its sender
//! is in a call by now. So the sender is woken first. If it waited, it faults again, and it was in
//! the same hold all the time ([`Inside`]).

use super::{log_inside, server_of, threads_for};
use crate::maps::kernel::pages::{PageRange, is_resident};
use crate::maps::kernel::userfault::{Fault, FaultWaiter, Userfault};
use crate::maps::region::{Regions, fault_time};
use crate::sync::{Mutex, Share, blocking};
use crate::sys::file::pipe;
use crate::sys::process::OwnedThread;
use rustix::pipe::PipeFlags;
use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

const THREADS: usize = 4;
/// Maximum number of threads: enough for 20 devices that hang, beside others.
const THREADS_MAX: usize = 80;
const DEVICE_THREADS_MAX: u64 = 4;
/// A device gets no further thread that would leave less than 1/SHARE_DIVISOR of the threads that
/// other devices do not use.
const SHARE_DIVISOR: u64 = 4;
const PAGE: usize = crate::page::PAGE_BYTES as usize;

#[derive(Debug)]
pub(crate) struct FaultThreads {
    shared: Arc<FaultQueue>,
    /// Closed to stop the threads.
    stop: Option<OwnedFd>,
    threads: Vec<OwnedThread>,
}

#[derive(Debug)]
struct FaultQueue {
    userfault: Arc<Userfault>,
    regions: Arc<Regions>,
    waiter: FaultWaiter,
    /// Messages that are read and not served yet. The thread that holds the lock reads more.
    messages: Mutex<Messages>,
    /// Requests whose device has its maximum of threads.
    postponed: Mutex<VecDeque<(Share, Request)>>,
    more: Mutex<More>,
}

#[derive(Debug, Default)]
struct Messages {
    requests: VecDeque<Request>,
    /// Faults of threads that held something when their messages had been read.
    inside: Vec<Inside>,
}

/// A fault of a thread that is perhaps inside a call, and was woken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Inside {
    thread: u32,
    page: usize,
    /// Number of the thread's hold ([`blocking::hold_of`]).
    hold: u32,
}

#[derive(Debug, Default)]
struct More {
    threads: Vec<OwnedThread>,
    /// Threads that are idle, of all.
    spare: usize,
    is_ending: bool,
}

/// Faults at adjacent pages, served together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Request {
    address: usize,
    length_bytes: usize,
    is_write: bool,
    /// Time when the messages were read, or later.
    read_at: u64,
}

impl FaultThreads {
    /// Starts the threads that serve the messages of `userfault`. On an error those already started
    /// are stopped.
    pub(crate) fn start(userfault: &Arc<Userfault>, regions: &Arc<Regions>) -> io::Result<Self> {
        let (stopped, stop) = pipe(PipeFlags::empty())?;
        let shared = Arc::new(FaultQueue {
            userfault: Arc::clone(userfault),
            regions: Arc::clone(regions),
            waiter: userfault.waiter(stopped)?,
            messages: Mutex::default(),
            postponed: Mutex::default(),
            more: Mutex::new(More { spare: THREADS, ..More::default() }),
        });
        // Its drop stops the threads already started if one cannot be.
        let mut started = Self { shared, stop: Some(stop), threads: Vec::new() };
        for number in 0..THREADS {
            let shared = Arc::clone(&started.shared);
            let name = format!("bifolio-fault-{number}");
            started.threads.push(OwnedThread::start(&name, move || shared.run())?);
        }
        Ok(started)
    }
}

impl Drop for FaultThreads {
    fn drop(&mut self) {
        if self.threads.iter().any(OwnedThread::is_of_parent) {
            // After a fork the locks may be held forever.
            std::mem::forget((self.stop.take(), Arc::clone(&self.shared)));
            return;
        }
        let more = {
            let mut more = self.shared.more.lock();
            more.is_ending = true;
            std::mem::take(&mut more.threads)
        };
        drop(self.stop.take());
        // Joins them, as the next drop joins the others.
        drop(more);
    }
}

impl FaultQueue {
    /// Serves requests until the threads must stop. A request whose device has its maximum of
    /// threads is postponed. While this thread serves a device it is not spare;
    /// `ensure_spare_thread` has taken it off the count.
    fn run(self: &Arc<Self>) {
        let _serving = blocking::serve();
        while let Some(request) = self.next() {
            let Some(threads) = threads_for(request.address) else {
                self.serve(request);
                continue;
            };
            let mut postponed = self.postponed.lock();
            if !may_have_one_more(&threads) {
                postponed.push_back((threads, request));
                continue;
            }
            drop(postponed);
            self.ensure_spare_thread();
            self.serve_devices(threads, request);
            self.more.lock().spare += 1;
        }
    }

    /// P1 to P5. The device counts this thread until P4.
    fn serve_devices(&self, mut threads: Share, mut request: Request) {
        loop {
            // The runtime has reported a panic; the thread continues.
            drop(catch_unwind(AssertUnwindSafe(|| self.serve(request))));
            let mut postponed = self.postponed.lock();
            let at = next_of(&threads, &postponed);
            let Some(next) = at.and_then(|at| postponed.remove(at)) else { return };
            (threads, request) = next;
        }
    }

    /// Takes this thread off the count of spare threads, because it is about to serve a device,
    /// which may hang; starts another one if none is left.
    fn ensure_spare_thread(self: &Arc<Self>) {
        let mut more = self.more.lock();
        more.spare -= 1;
        let count = THREADS + more.threads.len();
        if more.spare > 0 || count >= THREADS_MAX || more.is_ending {
            return;
        }
        let shared = Arc::clone(self);
        match OwnedThread::start(&format!("bifolio-fault-{count}"), move || shared.run()) {
            Ok(thread) => {
                more.threads.push(thread);
                more.spare += 1;
            }
            Err(error) => log::debug!("cannot start a thread for faults: {error}"),
        }
    }

    /// Returns the next request, or `None` when the threads must stop or can no longer read
    /// messages.
    fn next(&self) -> Option<Request> {
        let Messages { requests, inside } = &mut *self.messages.lock();
        while requests.is_empty() {
            let lost = |error: &_| self.regions.soundness.lose("faults cannot be served", error);
            if !self.waiter.wait().inspect_err(lost).ok()? {
                return None;
            }
            let (read_at, mut faults) = (fault_time(), Vec::new());
            self.userfault.read_faults(&mut faults).inspect_err(lost).ok()?;
            inside.retain(|fault| blocking::hold_of(fault.thread) == Some(fault.hold));
            let known = inside.len();
            faults.retain(|fault| !self.end_inside(fault, known, inside));
            requests.extend(coalesced(faults, read_at));
        }
        requests.pop_front()
    }

    /// Ends the fault of a thread that holds something: wakes the thread and adds the fault to
    /// `inside`; or raises SIGBUS, if the fault is one of the first `known` there: the thread has
    /// faulted again in the same hold. Returns `false` if the fault is to be served.
    fn end_inside(&self, fault: &Fault, known: usize, inside: &mut Vec<Inside>) -> bool {
        let Some(hold) = blocking::hold_of(fault.thread) else { return false };
        let page = fault.address / PAGE * PAGE;
        let range = PageRange { start: std::ptr::without_provenance_mut(page), length_bytes: PAGE };
        let fault = Inside { thread: fault.thread, page, hold };
        if !inside[..known].contains(&fault) {
            inside.push(fault);
            return self.userfault.wake(&range).is_ok();
        }
        if is_resident(range.start) {
            return false;
        }
        // Logged first, because the signal may end the process. Takes no lock that the thread may
        // hold, and so does not look up the file: the next thread that fills the page finds the
        // poison as a stray page.
        log_inside(page, fault.thread);
        self.regions.poison(&self.userfault, &range).is_ok()
    }

    fn serve(&self, request: Request) {
        let Request { address, length_bytes, is_write, read_at } = request;
        let Some(server) = server_of(address) else {
            let start = std::ptr::without_provenance_mut(address);
            let waked = self.userfault.wake(&PageRange { start, length_bytes });
            log::error!("a fault at {address:#x}, which is in no open file: {waked:?}");
            return;
        };
        let pages = server.pages_at(address, length_bytes);
        server.serve(pages.clone(), is_write, read_at);
        server.wake(&pages);
    }
}

/// Q2. Counts the thread if the device may have it.
fn may_have_one_more(threads: &Share) -> bool {
    let max = THREADS_MAX as u64;
    threads.own() < DEVICE_THREADS_MAX && threads.try_add(1, max, SHARE_DIVISOR).is_some()
}

/// P3 and P4: returns the index of the request that a thread serves next after one of this device.
fn next_of<T>(threads: &Share, postponed: &VecDeque<(Share, T)>) -> Option<usize> {
    let own = postponed.iter().position(|(other, _)| other.is_same(threads));
    own.or_else(|| {
        threads.sub(1);
        postponed.iter().position(|(other, _)| may_have_one_more(other))
    })
}

/// Sorts faults by address, merges those at adjacent pages, and removes duplicates.
fn coalesced(mut faults: Vec<Fault>, read_at: u64) -> Vec<Request> {
    faults.sort_unstable_by_key(|fault| fault.address / PAGE);
    let mut requests: Vec<Request> = Vec::new();
    for Fault { address, is_write, .. } in faults {
        let page = address / PAGE * PAGE;
        if let Some(last) = requests.last_mut() {
            let end = last.address + last.length_bytes;
            if page + PAGE == end {
                last.is_write |= is_write;
                continue;
            }
            if page == end && last.is_write == is_write {
                last.length_bytes += PAGE;
                continue;
            }
        }
        let length_bytes = PAGE;
        requests.push(Request { address: page, length_bytes, is_write, read_at });
    }
    requests
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::Cache;
    use crate::file::OpenOptions;
    use crate::maps::region::Region;
    use crate::sys::probe::Feature;

    fn fault(page: usize, is_write: bool) -> Fault {
        Fault { address: page * PAGE + 7, is_write, thread: 1 }
    }

    fn pages(requests: &[Request]) -> Vec<(usize, usize, bool)> {
        let page = |r: &Request| (r.address / PAGE, r.length_bytes / PAGE, r.is_write);
        requests.iter().map(page).collect()
    }

    /// The state of fault threads of a region that has none of its own, and what keeps it open.
    fn shared_of(region: &Region) -> (FaultQueue, OwnedFd) {
        let (stopped, stop) = pipe(PipeFlags::empty()).unwrap();
        let shared = FaultQueue {
            userfault: Arc::clone(&region.addresses.userfault),
            regions: Arc::clone(&region.addresses.regions),
            waiter: region.addresses.userfault.waiter(stopped).unwrap(),
            messages: Mutex::default(),
            postponed: Mutex::default(),
            more: Mutex::default(),
        };
        (shared, stop)
    }

    /// Without `UFFDIO_POISON`, the kernel lets a page be installed that refuses every access.
    #[test]
    fn a_page_whose_fault_was_refused_can_be_read_once_it_is_filled() {
        let builder = Cache::builder().memory(1 << 20).disable(Feature::FaultPoison);
        let options = OpenOptions::new().read(true).write(true).mappable(true);
        let Ok(file) = builder.build().unwrap().memory_file_with("filled", &options) else {
            return;
        };
        file.set_len(PAGE as u64).unwrap();
        let region = Region::of(&file.handle.inode.page_space).unwrap();
        let (shared, _stop) = shared_of(region);
        let address = region.addresses.range_at(0).start.addr();
        let fault = Fault { address, is_write: false, thread: blocking::current_thread() };
        let mut inside = Vec::new();
        blocking::track(1);
        assert!(
            shared.end_inside(&fault, 0, &mut inside) && shared.end_inside(&fault, 1, &mut inside)
        );
        blocking::track(-1);
        file.write_all_at(&[7; PAGE], 0).unwrap();
        let mut bytes = [0; PAGE];
        file.read_exact_at(&mut bytes, 0).unwrap();
        assert_eq!(bytes, [7; PAGE]);
    }

    /// A message whose sender goes on before it is judged, and is in a call by then, as a thread
    /// that lost its CPU after the read would judge it.
    #[test]
    fn a_fault_is_refused_only_if_its_thread_faults_again_in_the_same_hold() {
        let cache = Cache::builder().memory(1 << 20).build().unwrap();
        let options = OpenOptions::new().read(true).write(true).mappable(true);
        let Ok(file) = cache.memory_file_with("late", &options) else { return };
        file.set_len(2 * PAGE as u64).unwrap();
        let region = Region::of(&file.handle.inode.page_space).unwrap();
        if !cache.features().iter().any(|it| it.name == "fault-poison" && it.available) {
            return;
        }
        let (shared, _stop) = shared_of(region);
        let mut inside = Vec::new();
        let mut end = |page: u64, known| {
            let address = region.addresses.range_at(page).start.addr();
            let fault = Fault { address, is_write: false, thread: blocking::current_thread() };
            shared.end_inside(&fault, known, &mut inside)
        };
        // A missing page can be poisoned once.
        let poison =
            |page| shared.regions.poison(&shared.userfault, &region.addresses.range_at(page));
        assert!(!end(0, 0), "the thread holds nothing");
        blocking::track(1);
        assert!(end(0, 0) && end(0, 0), "two messages of one read");
        blocking::track(-1);
        blocking::track(1);
        assert!(end(0, 2), "another hold");
        poison(0).unwrap();
        assert!(end(1, 3) && end(1, 4), "twice in one hold");
        blocking::track(-1);
        assert_eq!(poison(1).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
    }

    #[test]
    fn devices_that_hang_leave_a_thread_that_waits_for_messages() {
        let all = Arc::default();
        let threads_of = |share: &Share| (0..).take_while(|_| may_have_one_more(share)).count();
        let devices: Vec<_> = (0..20).map(|_| Share::new(&all)).collect();
        let threads: Vec<_> = devices.iter().map(threads_of).collect();
        assert_eq!(threads, [vec![4; 19], vec![3]].concat());
        devices[0].sub(1);
        assert!(may_have_one_more(&devices[0]) && !may_have_one_more(&devices[0]));
    }

    #[test]
    fn an_idle_thread_serves_a_device_that_has_none() {
        let all = Arc::default();
        let devices: Vec<_> = (0..THREADS_MAX + 1).map(|_| Share::new(&all)).collect();
        let have_one: Vec<_> = devices.iter().map(may_have_one_more).collect();
        assert!(have_one[..THREADS_MAX].iter().all(|has_one| *has_one) && !have_one[THREADS_MAX]);
        let mut postponed = VecDeque::from([(devices[THREADS_MAX].clone(), ())]);
        assert_eq!(next_of(&devices[0], &postponed), Some(0));
        assert_eq!((devices[0].own(), devices[THREADS_MAX].own()), (0, 1));
        postponed.clear();
        assert_eq!(next_of(&devices[THREADS_MAX], &postponed), None);
        assert_eq!(all.load(crate::sync::Ordering::Relaxed), THREADS_MAX as u64 - 1);
    }

    #[test]
    fn adjacent_faults_are_served_together_each_page_once() {
        let faults = vec![fault(7, false), fault(5, false), fault(6, false), fault(5, false)];
        assert_eq!(pages(&coalesced(faults, 0)), [(5, 3, false)]);
        let faults = vec![fault(5, true), fault(9, false), fault(5, false)];
        assert_eq!(pages(&coalesced(faults, 0)), [(5, 1, true), (9, 1, false)]);
        // A page that is only read must not count as stored to.
        let faults = vec![fault(5, false), fault(6, true)];
        assert_eq!(pages(&coalesced(faults, 0)), [(5, 1, false), (6, 1, true)]);
    }
}
