//! The times of written files: the storage gets them once, soon after the program's last change.
//!
//! While a file has unwritten data, its times are ours, because each write-out moves those of the
//! file in the source directory. [`Inode::finalize`] ends that: it writes the pages, then sets the
//! modification time to that of the program's last change. From then on the times are those of the
//! storage, and nothing moves them but another change: no later write-out, and not the unmount.
//! Only the change time moves at this moment, because no program can set it.
//!
//! The times of a file become final when it is synced, when its last user has closed it, and when
//! it has not been changed for a while ([`Queue`]). One job per device finalizes files, so that a
//! device that hangs holds up only its own.

use std::collections::{HashMap, VecDeque};
use std::ops::Deref;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use bifolio::ErrorKind;
use fuser::INodeNo;
use parking_lot::{Condvar, Mutex};

use crate::data::{Data, Opened};
use crate::error::{Error, Result};
use crate::inode::Inode;
use crate::volume::Volume;

/// A change of a file's contents that is being made.
pub struct Change {
    pub opened: Opened,
    /// Number of the change, and the times before it.
    pub number: u64,
    pub before: (Option<SystemTime>, Option<SystemTime>),
    /// Shows that a change is being made.
    pub _counted: Arc<()>,
}

impl Change {
    /// Gives the file back the times from before a change that has failed, unless it was changed
    /// again meanwhile.
    pub fn undo(self, inode: &Inode) {
        let mut data = inode.data();
        if data.changes() == self.number {
            (data.modified, data.changed) = self.before;
        }
    }
}

impl Deref for Change {
    type Target = Opened;

    fn deref(&self) -> &Opened {
        &self.opened
    }
}

/// Files that have unwritten times.
pub struct Queue {
    state: Mutex<State>,
    arrived: Condvar,
    /// Time for which a file that is open must have been left alone.
    delay: Duration,
}

#[derive(Default)]
struct State {
    /// Changed files, with the time at which to look at them: all have the same delay.
    changed: VecDeque<(Instant, INodeNo)>,
    /// Changed files that were closed by their last user.
    closed: VecDeque<INodeNo>,
}

/// The part of the queue that a file is in. It may be in both.
#[derive(Clone, Copy)]
pub enum Reason {
    Changed,
    Closed,
}

/// Files of each device that may finalize now.
type Ready = Mutex<HashMap<u64, VecDeque<(Arc<Inode>, Reason)>>>;

impl Queue {
    pub fn new(delay: Duration) -> Self {
        Self { state: Mutex::default(), arrived: Condvar::new(), delay }
    }

    fn add(&self, number: INodeNo, reason: Reason) {
        let mut state = self.state.lock();
        // The thread that waits for an earlier one looks at this one in time.
        let must_wake = match reason {
            Reason::Changed => {
                let is_first = state.changed.is_empty();
                state.changed.push_back((Instant::now() + self.delay, number));
                is_first
            }
            Reason::Closed => {
                state.closed.push_back(number);
                true
            }
        };
        if must_wake {
            self.arrived.notify_one();
        }
    }

    /// Waits for the next file.
    fn next(&self) -> (INodeNo, Reason) {
        let mut state = self.state.lock();
        loop {
            if let Some(number) = state.closed.pop_front() {
                return (number, Reason::Closed);
            }
            let first = state.changed.front().copied();
            match first {
                Some((due, number)) if due <= Instant::now() => {
                    state.changed.pop_front();
                    return (number, Reason::Changed);
                }
                Some((due, _)) => drop(self.arrived.wait_until(&mut state, due)),
                None => self.arrived.wait(&mut state),
            }
        }
    }
}

/// Finalizes files for as long as the program runs.
pub fn serve(volume: &Arc<Volume>) {
    let ready = Arc::new(Ready::default());
    loop {
        let (number, reason) = volume.table.pending_times().next();
        // A file that is gone has no times.
        let Ok(inode) = volume.table.get(number) else { continue };
        let device = inode.key.0;
        let mut devices = ready.lock();
        let has_job = devices.contains_key(&device);
        devices.entry(device).or_default().push_back((inode, reason));
        drop(devices);
        if !has_job {
            let (of_job, ready) = (Arc::clone(volume), Arc::clone(&ready));
            volume.workers.spawn(move || of_job.finalize_all(device, &ready));
        }
    }
}

impl Volume {
    /// Finalizes the files of a device until none is left.
    fn finalize_all(&self, device: u64, ready: &Ready) {
        loop {
            let mut devices = ready.lock();
            let next = devices.get_mut(&device).and_then(VecDeque::pop_front);
            let Some((inode, reason)) = next else {
                devices.remove(&device);
                return;
            };
            drop(devices);
            inode.data().leave_queue(reason);
            match inode.finalize(self.table.pending_times().delay) {
                Ok(true) => self.forget_attributes(inode.number),
                Ok(false) => {}
                // The unmount has written the file and set its times.
                Err(Error::Cache(error)) if error.kind() == ErrorKind::Closed => {}
                Err(error) => {
                    // The next change, sync or close tries again.
                    let _logged = error.answer();
                }
            }
        }
    }
}

impl Inode {
    /// Adds a changed file to the queue, unless it is in it.
    pub fn enter_queue(&self, data: &mut Data, reason: Reason) {
        if data.modified.is_some() && data.enter_queue(reason) {
            self.pending_times.add(self.number, reason);
        }
    }

    /// Writes the pages and sets the times. If a program changes the file at the moment, or has it
    /// open and has changed it within `delay`, the file goes to the queue again. Returns `true` if
    /// the times are the storage's now, and were not before.
    fn finalize(&self, delay: Duration) -> Result<bool> {
        let mut data = self.data();
        if data.is_being_changed(delay) {
            self.enter_queue(&mut data, Reason::Changed);
            return Ok(false);
        }
        if data.modified.is_none() {
            return Ok(false);
        }
        let changes = data.changes();
        drop(data);
        self.write_pages()?;
        self.finish_finalizing(changes)
    }

    /// Sets the times after the pages are written, if no program has changed the file since it had
    /// `changes`. Returns `true` if the times are the storage's now, and were not before.
    pub fn finish_finalizing(&self, changes: u64) -> Result<bool> {
        let mut data = self.data();
        let Some(modified) = data.modified else { return Ok(false) };
        if data.is_being_changed(Duration::ZERO) || data.changes() != changes {
            self.enter_queue(&mut data, Reason::Changed);
            return Ok(false);
        }
        self.set_modified(modified)?;
        data.finalize();
        Ok(true)
    }
}
