//! Waits of asynchronous calls on threads: for room under the dirty limit, for the length of a
//! file, and calls that are made by a thread as a whole, appends and syncs.
//!
//! The calls of a device that wait for the same share one thread: all writes that wait for room,
//! all appends to a file, all syncs through a handle, which become one. So the number of threads
//! depends on the files in use, at most [`THREADS_MAX`] a device, and not on the number of calls.

use super::call::{AsyncCall, ReadServer, WaitKey, thread_has_ended};
use super::pending::{Pending, Work};
use crate::file::{File, WriteHint};
use crate::inode::NoRoom;
use crate::io::Urgency;
use std::collections::VecDeque;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// Most threads of a device. A write gate whose log is synced by such calls needs one beside those
/// that ask it.
const THREADS_MAX: usize = 32;

/// Queues a call of `server`, for a thread that serves `key`.
pub(super) fn hand_on(server: &Arc<ReadServer>, key: WaitKey, call: Arc<AsyncCall>) {
    if server.jobs.add(key, call, THREADS_MAX) {
        let job = CallJob(Some(Arc::clone(server)));
        // A job that is not started is dropped, and ends the calls that no other thread serves.
        let _ = server.engine.spawn(server.lane, Urgency::Always, move || job.run());
    }
}

/// A thread that serves calls. If it is dropped without being run, it ends those of no other
/// thread.
#[derive(Debug)]
struct CallJob(Option<Arc<ReadServer>>);

impl CallJob {
    fn run(mut self) {
        let Some(server) = self.0.take() else { return };
        while let Some((key, calls)) = server.jobs.next() {
            // A gate or a backing of the user may panic.
            let served = catch_unwind(AssertUnwindSafe(|| serve(key, &calls)));
            if served.is_err() {
                calls.iter().for_each(end);
            }
            server.jobs.done(key);
        }
    }
}

impl Drop for CallJob {
    fn drop(&mut self) {
        let Some(server) = self.0.take() else { return };
        server.jobs.give_up().iter().for_each(end);
    }
}

/// Ends a call whose thread has died or did not start.
#[cold]
fn end(call: &Arc<AsyncCall>) {
    if call.is_of_thread() {
        return call.complete(|pending| pending.fail(thread_has_ended()));
    }
    let _ = call.handover.with(|pending| pending.fail(thread_has_ended()));
    call.call_again();
}

/// Does what the calls wait for, once for all of them, or makes each on this thread. Blocks.
fn serve(key: WaitKey, calls: &VecDeque<Arc<AsyncCall>>) {
    match key {
        WaitKey::Room { .. } => wait_for_room(calls),
        WaitKey::Length(_) => {
            if let Some((file, _)) = first_of(calls) {
                drop(file.handle.inode.lock_resizing());
            }
            calls.iter().for_each(AsyncCall::call_again);
        }
        WaitKey::Thread(_) => calls.iter().for_each(make),
        WaitKey::Sync(_) => {
            let Some((file, _)) = first_of(calls) else { return };
            let synced = file.sync_data();
            // A caller whose future is ready may want the last handle.
            drop(file);
            for call in calls {
                call.complete(|pending| pending.result = synced.clone().map(|()| 0));
            }
        }
    }
}

/// Returns the file of the first call that was not abandoned, and what it has not done.
fn first_of(calls: &VecDeque<Arc<AsyncCall>>) -> Option<(File, Range<u64>)> {
    let look = |pending: &mut Pending| (pending.file.clone(), pending.missing());
    calls.iter().find_map(|call| call.handover.with(look))
}

/// Waits until a page of the device may become dirty, for the first call, and lets all try again.
/// If that fails, so do the calls of the same file.
fn wait_for_room(calls: &VecDeque<Arc<AsyncCall>>) {
    if let Some((file, missing)) = first_of(calls) {
        let piece = file.first_piece(missing);
        let length = piece.end - piece.start;
        let room = file.handle.make_room(NoRoom::DirtyLimit, piece.start, length);
        if let Err(error) = room {
            let fail = |pending: &mut Pending| {
                if Arc::ptr_eq(&pending.file.handle.inode, &file.handle.inode) {
                    pending.fail(error.clone());
                }
            };
            for call in calls {
                let _ = call.handover.with(fail);
            }
        }
    }
    calls.iter().for_each(AsyncCall::call_again);
}

/// Makes a call as a whole. Once its bytes are taken, it is made even if its future is dropped.
fn make(call: &Arc<AsyncCall>) {
    let take = |pending: &mut Pending| {
        let (start, is_append) = (pending.missing().start, matches!(pending.work, Work::Append(_)));
        let done = (start - pending.position) as usize;
        let is_once = pending.hint == Some(WriteHint::Once);
        (pending.file.clone(), start, done, is_append, is_once, pending.take_bytes())
    };
    let taken = call.handover.with(take);
    let Some((file, position, done, is_append, is_once, bytes)) = taken else { return };
    let made = match is_append {
        true => file.append(&bytes),
        false => file.write_all_at(&bytes[done..], position).map(|()| position - done as u64),
    };
    // The call has followed the hint of the handle.
    if is_once && let Ok(position) = made {
        file.advise_written(position..position + bytes.len() as u64, true);
    }
    // A caller whose future is ready may want the last handle.
    drop(file);
    call.complete(|pending| {
        pending.is_advised = true;
        pending.result = made.map(|position| {
            pending.position = position;
            bytes.len()
        });
        pending.work = if is_append { Work::Append(bytes) } else { Work::Write(bytes) };
    });
}
