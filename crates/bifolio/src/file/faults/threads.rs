//! Threads that serve faults: one waits for messages of the kernel, the others serve, or wait for
//! their turn.

use super::server_of;
use crate::frames::{FAULT_CLOCK, Regions};
use crate::sync::Mutex;
use crate::sys::thread::OwnedThread;
use crate::sys::userfault::{Fault, FaultWaiter, Userfault};
use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// How many faults are served at a time: each may wait for the device.
const THREADS: usize = 4;
const PAGE: usize = crate::mapping::PAGE_BYTES as usize;

/// The running threads; dropping them ends them and waits for that.
#[derive(Debug)]
pub(in crate::file) struct FaultThreads {
    shared: Arc<Shared>,
    /// Closed to end them.
    stop: Option<OwnedFd>,
    threads: Vec<OwnedThread>,
}

#[derive(Debug)]
struct Shared {
    userfault: Arc<Userfault>,
    regions: Arc<Regions>,
    waiter: FaultWaiter,
    /// Whoever holds it waits for messages.
    requests: Mutex<VecDeque<Request>>,
}

/// Faults at adjacent pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Request {
    address: usize,
    length_bytes: usize,
    is_write: bool,
    /// When the messages were read: not before this.
    read_at: u64,
}

impl FaultThreads {
    /// Serves the faults of all of `regions`, which `userfault` knows.
    pub(in crate::file) fn start(
        userfault: &Arc<Userfault>,
        regions: &Arc<Regions>,
    ) -> io::Result<Self> {
        let (stopped, stop) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
        let (waiter, requests) = (userfault.waiter(stopped)?, Mutex::default());
        let (userfault, regions) = (Arc::clone(userfault), Arc::clone(regions));
        let shared = Arc::new(Shared { userfault, regions, waiter, requests });
        // Its drop ends those that were started if one cannot be.
        let mut started = Self { shared, stop: Some(stop), threads: Vec::new() };
        for number in 0..THREADS {
            let shared = Arc::clone(&started.shared);
            let name = format!("bifolio-fault-{number}");
            started.threads.push(OwnedThread::start(&name, move || shared.run())?);
        }
        Ok(started)
    }

    /// Where their regions register.
    pub(in crate::file) fn userfault(&self) -> &Arc<Userfault> {
        &self.shared.userfault
    }
}

impl Drop for FaultThreads {
    fn drop(&mut self) {
        if self.threads.iter().any(OwnedThread::is_left_behind) {
            std::mem::forget(self.stop.take());
        } else {
            drop(self.stop.take());
        }
    }
}

impl Shared {
    fn run(&self) {
        while let Some(request) = self.next() {
            self.serve(request);
        }
    }

    /// The next request; `None` when the threads are to end, or cannot be told of faults.
    fn next(&self) -> Option<Request> {
        let mut requests = self.requests.lock();
        while requests.is_empty() {
            let lost = |error| self.regions.soundness().lose("faults cannot be served", error);
            if !self.waiter.wait().map_err(lost).ok()? {
                return None;
            }
            let (read_at, mut faults) = (FAULT_CLOCK.now(), Vec::new());
            self.userfault.read_faults(&mut faults).map_err(lost).ok()?;
            requests.extend(coalesced(faults, read_at));
        }
        requests.pop_front()
    }

    fn serve(&self, request: Request) {
        let Request { address, length_bytes, is_write, read_at } = request;
        let Some(server) = server_of(address) else {
            let waked =
                self.userfault.wake(std::ptr::without_provenance_mut(address), length_bytes);
            log::error!("a fault at {address:#x}, which is in no open file: {waked:?}");
            return;
        };
        let pages = server.pages_at(address, length_bytes);
        server.serve(pages.clone(), is_write, read_at);
        server.wake(&pages);
    }
}

/// Faults in the order of their addresses, those at adjacent pages as one; each page once.
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

    fn fault(page: usize, is_write: bool) -> Fault {
        Fault { address: page * PAGE + 7, is_write }
    }

    fn pages(requests: &[Request]) -> Vec<(usize, usize, bool)> {
        let page = |r: &Request| (r.address / PAGE, r.length_bytes / PAGE, r.is_write);
        requests.iter().map(page).collect()
    }

    #[test]
    fn faults_at_adjacent_pages_are_served_together_and_each_page_once() {
        let faults = vec![fault(7, false), fault(5, false), fault(6, false), fault(5, false)];
        assert_eq!(pages(&coalesced(faults, 0)), [(5, 3, false)]);
        let faults = vec![fault(5, true), fault(9, false), fault(5, false)];
        assert_eq!(pages(&coalesced(faults, 0)), [(5, 1, true), (9, 1, false)]);
        // What is only read must not count as stored to.
        let faults = vec![fault(5, false), fault(6, true)];
        assert_eq!(pages(&coalesced(faults, 0)), [(5, 1, false), (6, 1, true)]);
    }
}
