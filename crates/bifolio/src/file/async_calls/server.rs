//! The server of asynchronous reads: one job per device that makes the transfers of all reads.
//!
//! A read is *ready* when the server has to look at it: it is new, its transfers have ended, or a
//! page that it waits for was unlocked. The server then copies what is resident, and if bytes are
//! missing, claims the absent pages or registers for the folio lock of the next page. A read that
//! finds no frames is *starved*: it is the first to be looked at after the next transfer.
//!
//! While transfers are in flight, the server waits only for them and for the bell (IO-5). Only with
//! none in flight it waits for frames, for the first starved read: so a read makes progress in a
//! cache of any size.
//!
//! The last handle of a file may be dropped here, if its future is dropped while the server looks
//! at the read. A close waits for storage, so another thread of the engine does it.

use super::call::{AsyncCall, NO_NUMBER, OF_THREAD, ReadServer, WaitKey, end_unserved};
use super::handover::{Call, Handover, Rest};
use super::jobs::hand_on;
use super::pending::{NextStep, Pending};
use super::try_write::{Need, Stopped};
use crate::error::{Error, Result};
use crate::file::{File, Handle, PageRef};
use crate::fill::{FillQueue, Locked, ReadIoClaim, Wait};
use crate::io::{Engine, Urgency, lane_of};
use crate::memory::Memory;
use crate::page::{FolioId, Lookup, PAGE_SHIFT, pages_of};
use crate::sync::{Mutex, Ordering};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::task::Waker;

/// Most bytes of one read in flight at a time.
const READ_BYTES_MAX: u64 = 8 << 20;

/// Submits a call that `need` stops.
pub(super) fn submit(pending: Pending, need: Need, waker: Waker) -> Result<Arc<AsyncCall>> {
    let server = ReadServer::of(&pending.file.handle)?;
    let key = (need == Need::Thread).then(|| WaitKey::of_thread(&pending));
    let number = AtomicUsize::new(if key.is_some() { OF_THREAD } else { NO_NUMBER });
    let handover = Handover::new(pending, waker);
    let call = Arc::new(AsyncCall { server: Arc::clone(&server), handover, number });
    if let Some(key) = key {
        hand_on(&server, key, Arc::clone(&call));
        return Ok(call);
    }
    match server.inbox.submit(Arc::clone(&call)) {
        Call::Nothing => {}
        Call::Ring => server.bell.ring(),
        Call::Start => {
            let serving = ServerJob(Some(Arc::clone(&server)));
            let job = move || serving.serve();
            // A job that is not started is dropped, and ends the calls that are queued.
            server.engine.spawn(server.lane, Urgency::Always, job).map_err(Error::thread)?;
        }
    }
    Ok(call)
}

/// The job of a server. If it is dropped without being run, or panics, it ends the queued reads.
#[derive(Debug)]
struct ServerJob(Option<Arc<ReadServer>>);

impl ServerJob {
    fn serve(mut self) {
        self.0.as_ref().into_iter().for_each(|server| ReadLoop::serve(server));
        // Another job may have started.
        self.0 = None;
    }
}

impl Drop for ServerJob {
    fn drop(&mut self) {
        let queued = self.0.as_ref().map(|server| server.inbox.give_up()).unwrap_or_default();
        queued.iter().for_each(|read| end_unserved(read));
    }
}

#[derive(Debug)]
struct Entrant {
    read: Arc<AsyncCall>,
    runs: usize,
    is_parked: bool,
    /// Folio whose lock the read has last waited for: it may still have the waker.
    parked_at: Option<FolioId>,
    /// Set after a run of several folios failed: one folio at a time.
    is_one_by_one: bool,
}

enum Look {
    /// The read is complete, or fails.
    Ended(Option<Error>),
    /// Transfers are in flight, or a waker is registered.
    Waits,
    Starved,
    Abandoned,
    /// A thread makes the call.
    HandedOn,
}

/// Makes one step of a call. Only a copy of a page happens under the lock of the call. Returns what
/// is needed for the next step, and `None` if the call was abandoned.
fn try_step(file: &File, call: &AsyncCall, wait: Wait) -> Option<Result<Need>> {
    let attempt = match call.handover.with(Pending::next_step)? {
        NextStep::Get(need) => return Some(Ok(need)),
        NextStep::Pin(range) => match file.try_pin(&range, wait).map(PageRef::into_owned) {
            Ok(pin) => {
                call.handover.with(|pending| pending.keep(pin))?;
                return Some(Ok(Need::Nothing));
            }
            Err(stopped) => Err(stopped),
        },
        NextStep::Write(piece) => match file.try_lock_target(&piece, wait) {
            Ok(target) => call.handover.with(|pending| {
                pending.write_piece(|_, position, bytes| target.write(position, bytes))
            })?,
            Err(stopped) => Err(stopped),
        },
    };
    Some(match attempt {
        Ok(()) => Ok(Need::Retry),
        Err(Stopped::By(need)) => Ok(need),
        Err(Stopped::Failed(error)) => Err(error),
    })
}

#[derive(Debug)]
struct ReadLoop<'s> {
    memory: &'s Memory,
    engine: &'s Engine,
    queue: FillQueue<'s, usize>,
    reads: Vec<Option<Entrant>>,
    vacant: Vec<usize>,
    ready: VecDeque<usize>,
    /// Reads that have ended since the inbox was told.
    ended: usize,
    closing: Vec<Handle>,
}

impl<'s> ReadLoop<'s> {
    /// Serves calls until none is known. While transfers are in flight it waits only for them and
    /// the bell; otherwise for frames, for the first starved call, or for the bell.
    fn serve(shared: &'s ReadServer) {
        let mut server = ReadLoop {
            memory: &shared.memory,
            engine: &shared.engine,
            queue: FillQueue::new(&shared.engine),
            reads: Vec::new(),
            vacant: Vec::new(),
            ready: VecDeque::new(),
            ended: 0,
            closing: Vec::new(),
        };
        loop {
            server.admit(shared.inbox.take());
            while server.queue.runs() < server.queue.prepared_max()
                && let Some(number) = server.ready.pop_front()
                && server.look(number, Wait::Never)
            {}
            server.finish_runs();
            if server.queue.runs() > 0 {
                if server.ready.is_empty() {
                    match shared.inbox.rest(std::mem::take(&mut server.ended)) {
                        Rest::Work => server.queue.transfers.begin(),
                        Rest::Sleep | Rest::End => server.queue.wait_or_rung(&shared.bell),
                    }
                    // Before tasks are woken: their next reads need not ring.
                    server.admit(shared.inbox.take());
                } else {
                    server.queue.wait_for(server.queue.completions_wanted());
                }
                server.finish_runs();
                continue;
            }
            server.closing.clear();
            if let Some(number) = server.ready.pop_front() {
                server.look(number, Wait::ForFrames);
            } else {
                match shared.inbox.rest(std::mem::take(&mut server.ended)) {
                    Rest::Work => {}
                    Rest::Sleep => shared.bell.wait(),
                    Rest::End => return,
                }
            }
        }
    }

    /// Notes new reads, and those whose page was unlocked or that were abandoned.
    fn admit(&mut self, reads: VecDeque<Arc<AsyncCall>>) {
        for read in reads {
            // Relaxed: only this thread uses it, or the next server after it.
            let number = read.number.load(Ordering::Relaxed);
            let known = self.reads.get_mut(number).and_then(Option::as_mut);
            let known = known.filter(|entrant| Arc::ptr_eq(&entrant.read, &read));
            if let Some(entrant) = known {
                if std::mem::replace(&mut entrant.is_parked, false) {
                    self.ready.push_back(number);
                }
            } else if number == NO_NUMBER {
                let number = self.vacant.pop().unwrap_or_else(|| {
                    self.reads.push(None);
                    self.reads.len() - 1
                });
                read.number.store(number, Ordering::Relaxed);
                self.reads[number] = Some(Entrant {
                    read,
                    runs: 0,
                    is_parked: false,
                    parked_at: None,
                    is_one_by_one: false,
                });
                self.ready.push_back(number);
            }
        }
    }

    /// Publishes the runs whose transfers have ended, and completes the calls that have all their
    /// bytes.
    fn finish_runs(&mut self) {
        while let Some(ended) = self.queue.ended.pop_front() {
            let number = ended.note;
            let entrant = self.entrant(number);
            entrant.runs -= 1;
            let (is_last, read) = (entrant.runs == 0, Arc::clone(&entrant.read));
            let run = &ended.run;
            let (page, count, inode) = (run.first, run.folios.len(), Arc::clone(&run.inode));
            let deliver = |locked: Locked<'_>| {
                read.handover.with(|pending| pending.take(&inode, &locked));
            };
            let outcome = ended.publish(&self.memory.folios, deliver);
            drop(inode);
            match outcome {
                Err(error) if count == 1 => {
                    read.handover.with(|pending| {
                        if !pending.is_finished() && pending.next() >> PAGE_SHIFT >= page {
                            pending.fail(error);
                        }
                    });
                }
                Err(_) => self.entrant(number).is_one_by_one = true,
                Ok(()) => {}
            }
            if !is_last {
                continue;
            }
            if read.handover.with(|pending| pending.is_finished()) == Some(true) {
                self.end(number);
                read.complete(|_| ());
            } else {
                self.ready.push_back(number);
            }
        }
    }

    fn entrant(&mut self, number: usize) -> &mut Entrant {
        self.reads[number].as_mut().expect("a read with a number is known")
    }

    fn end(&mut self, number: usize) {
        self.reads[number] = None;
        self.vacant.push(number);
        self.ended += 1;
    }

    /// Copies what is resident of a read, and lets it wait for the rest. Returns `false` if it is
    /// starved.
    fn look(&mut self, number: usize, wait: Wait) -> bool {
        let read = Arc::clone(&self.entrant(number).read);
        let look = match read.handover.with(|pending| pending.file.clone()) {
            Some(file) => {
                let look = self.look_at(&file, &read, number, wait);
                self.let_go(file);
                look
            }
            None => Look::Abandoned,
        };
        match look {
            Look::Waits | Look::HandedOn => {}
            Look::Starved => {
                self.ready.push_front(number);
                return false;
            }
            Look::Abandoned => {
                if let Some(id) = self.entrant(number).parked_at {
                    self.memory.folio(id).forget_waker(Arc::as_ptr(&read).cast());
                }
                self.end(number);
            }
            Look::Ended(error) => {
                self.end(number);
                read.complete(|pending| error.into_iter().for_each(|error| pending.fail(error)));
            }
        }
        true
    }

    /// Goes on with a call until it is complete or has to wait, and registers it for what it waits
    /// for.
    fn look_at(&mut self, file: &File, read: &Arc<AsyncCall>, number: usize, wait: Wait) -> Look {
        loop {
            let need = match try_step(file, read, wait) {
                Some(Ok(need)) => need,
                Some(Err(error)) => return Look::Ended(Some(error)),
                None => return Look::Abandoned,
            };
            let Some(missing) = read.handover.with(|pending| pending.wanted()) else {
                return Look::Abandoned;
            };
            match need {
                Need::Nothing => return Look::Ended(None),
                Need::Retry => {}
                Need::Frames => return Look::Starved,
                Need::Page => {
                    let end = missing.end.min(missing.start + READ_BYTES_MAX).min(file.len());
                    let mut pages = pages_of(&(missing.start..end.max(missing.start + 1)));
                    if self.entrant(number).is_one_by_one {
                        pages.end =
                            file.handle.inode.mapping.end_of_unit(pages.start).min(pages.end);
                    }
                    match self.start_reading(file, number, pages, wait) {
                        Ok(Some(look)) => return look,
                        // Another thread has claimed the page meanwhile.
                        Ok(None) => {}
                        Err(error) => return Look::Ended(Some(error)),
                    }
                }
                Need::Lock => {
                    if let Some(look) = self.park(file, read, number, missing.start, wait) {
                        return look;
                    }
                }
                Need::WriteOut(id) => {
                    let flags = &self.memory.folio(id).flags;
                    if !flags.is_written_or_wake(Waker::from(Arc::clone(read))) {
                        self.entrant(number).is_parked = true;
                        self.entrant(number).parked_at = Some(id);
                        return Look::Waits;
                    }
                }
                Need::Room | Need::Length => {
                    let inode = &file.handle.inode;
                    let key = match need {
                        Need::Length => WaitKey::Length(inode.address),
                        _ => WaitKey::Room { has_gate: inode.has_gate() },
                    };
                    self.entrant(number).is_parked = true;
                    hand_on(&read.server, key, Arc::clone(read));
                    return Look::Waits;
                }
                Need::Thread => {
                    let Some(key) = read.handover.with(|pending| WaitKey::of_thread(pending))
                    else {
                        return Look::Abandoned;
                    };
                    self.end(number);
                    // Relaxed: the list that the call is put on orders it.
                    read.number.store(OF_THREAD, Ordering::Relaxed);
                    hand_on(&read.server, key, Arc::clone(read));
                    return Look::HandedOn;
                }
            }
        }
    }

    /// Starts transfers of the absent pages among `left`. Returns `None` if other threads have
    /// claimed all of them.
    fn start_reading(
        &mut self,
        file: &File,
        number: usize,
        mut left: Range<u64>,
        wait: Wait,
    ) -> Result<Option<Look>> {
        let mut runs = 0;
        let outcome = loop {
            let wait = if self.queue.runs() == 0 { wait } else { Wait::Never };
            match file.handle.fill().claim_next(&mut left, wait) {
                Ok(ReadIoClaim::New(run)) => {
                    self.queue.add(run, number);
                    runs += 1;
                }
                Ok(ReadIoClaim::Taken) => break Ok(None),
                Ok(ReadIoClaim::NoFrame) => break Ok(Some(Look::Starved)),
                Err(error) => break Err(error),
            }
            if self.queue.runs() >= self.queue.prepared_max() {
                break Ok(None);
            }
        };
        self.entrant(number).runs += runs;
        // What could not be started is looked at again after the transfers.
        if runs > 0 { Ok(Some(Look::Waits)) } else { outcome }
    }

    /// Registers a read for the folio lock of the page at `position`. Returns `None` if the page
    /// can be looked at again at once.
    fn park(
        &mut self,
        file: &File,
        read: &Arc<AsyncCall>,
        number: usize,
        position: u64,
        wait: Wait,
    ) -> Option<Look> {
        let (inode, index) = (&*file.handle.inode, position >> PAGE_SHIFT);
        let folios = &inode.memory.folios;
        let found = match wait {
            Wait::ForFrames => Some(inode.mapping.get_folio(folios, index)),
            Wait::Never | Wait::NeverNorEvict => inode.mapping.try_get_folio(folios, index),
        };
        match found {
            Some(Lookup::Folio(folio)) => {
                self.entrant(number).is_parked = true;
                let is_free = folio.try_lock_or_wake(Waker::from(Arc::clone(read))).is_some();
                self.entrant(number).is_parked = !is_free;
                self.entrant(number).parked_at = Some(folio.id());
                if is_free { None } else { Some(Look::Waits) }
            }
            Some(Lookup::Absent(_)) => None,
            Some(Lookup::Refused) => Some(Look::Ended(Some(inode.too_many_pins(index)))),
            // Another thread is about to evict or move the folio.
            None => Some(Look::Starved),
        }
    }

    /// Drops a handle; the last one on another thread.
    fn let_go(&mut self, file: File) {
        let Some(handle) = Arc::into_inner(file.handle) else { return };
        let reader = handle.inode.store.reader();
        let last = Arc::new(Mutex::new(Some(handle)));
        let closer = Arc::clone(&last);
        let close = move || drop(closer.lock().take());
        let spawn = |reader| self.engine.spawn(lane_of(&reader), Urgency::Now, close).is_ok();
        if !reader.is_some_and(spawn) {
            self.closing.extend(last.lock().take());
        }
    }
}

impl Drop for ReadLoop<'_> {
    fn drop(&mut self) {
        // Only after a panic: every read has ended otherwise.
        for entrant in self.reads.drain(..).flatten() {
            end_unserved(&entrant.read);
        }
    }
}
