//! Calls that complete later: reads, writes, appends and syncs that do not block, each with a
//! function that is called with the result.
//!
//! A call is a future of the library. The exported function polls it once; if it must wait, its
//! waker queues it for one thread of the process, which polls it again and calls the function. The
//! thread is started by the first such call.
//!
//! # Safety
//! Writes to a buffer of the caller, and calls a function of the caller, until the call is
//! complete: under the contract of [`bifolio_done_function`].
#![allow(unsafe_code)]

use crate::boundary::{Failure, bytes, bytes_mut, guard, handle};
use crate::file::bifolio_file;
use crate::result::{self, bifolio_result};
use bifolio::FileFuture;
use std::collections::VecDeque;
use std::ffi::c_void;
use std::fmt;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Wake, Waker};

/// A function that is called when a call is complete, once. `value` depends on the call. If
/// `result` is not `BIFOLIO_OK`, `bifolio_last_error` has the text, during the function.
///
/// It runs in the call itself if nothing had to be waited for, and otherwise on a thread of the
/// library, which serves all calls of the process: it must not wait for one. To wake an event loop,
/// it writes to an `eventfd`. It must not throw (declare it `noexcept`).
pub type bifolio_done_function =
    Option<unsafe extern "C" fn(result: bifolio_result, value: u64, context: *mut c_void)>;

/// Begins a read of `length` bytes at `offset` into `buffer`, which the call may write to until
/// `done` is called. The value is the number of bytes read: fewer only at the end of the file. If
/// the result is not `BIFOLIO_OK` when the function returns, the call has not begun, and `done` is
/// not called.
///
/// Threads: any, at the same time. Blocks: never.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_file_read_async(
    file: *const bifolio_file,
    offset: u64,
    buffer: *mut c_void,
    length: usize,
    done: bifolio_done_function,
    context: *mut c_void,
) -> bifolio_result {
    guard(|| {
        // SAFETY: null, or a live handle.
        let file = unsafe { handle(file, "file")? };
        // SAFETY: null, or a buffer of `length` bytes that is the caller's alone.
        let target = Address(unsafe { bytes_mut(buffer, length, "buffer")? }.as_mut_ptr());
        let future = file.file().read_async(vec![0; length], offset);
        begin(future, done, context, move |bytes: Vec<u8>| {
            let target = target;
            // SAFETY: the caller's buffer, of at least so many bytes, until `done` is called.
            unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), target.0, bytes.len()) };
            bytes.len() as u64
        })
    })
}

/// Begins a write of all `length` bytes of `buffer` at `offset`. The bytes are copied: the buffer
/// can be used again when the function returns. The call is complete when the bytes are in memory
/// and no more is dirty than may be; the value is 0. `done` as for `bifolio_file_read_async`.
///
/// Threads: any, at the same time. Blocks: never.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_file_write_async(
    file: *const bifolio_file,
    offset: u64,
    buffer: *const c_void,
    length: usize,
    done: bifolio_done_function,
    context: *mut c_void,
) -> bifolio_result {
    guard(|| {
        // SAFETY: null, or a live handle.
        let file = unsafe { handle(file, "file")? };
        // SAFETY: null, or a buffer of `length` bytes that no thread writes.
        let bytes = unsafe { bytes(buffer, length, "buffer")? }.to_vec();
        begin(file.file().write_async(bytes, offset), done, context, |_| 0)
    })
}

/// Begins to append all `length` bytes of `buffer`, as `bifolio_file_write_async` begins a write.
/// The value is the position of the first byte. Appends of one thread to a file are made in the
/// order of their calls.
///
/// Threads: any, at the same time. Blocks: never.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_file_append_async(
    file: *const bifolio_file,
    buffer: *const c_void,
    length: usize,
    done: bifolio_done_function,
    context: *mut c_void,
) -> bifolio_result {
    guard(|| {
        // SAFETY: null, or a live handle.
        let file = unsafe { handle(file, "file")? };
        // SAFETY: null, or a buffer of `length` bytes that no thread writes.
        let bytes = unsafe { bytes(buffer, length, "buffer")? }.to_vec();
        begin(file.file().append_async(bytes), done, context, |position| position)
    })
}

/// Begins to make everything durable that was written before the call. Syncs of a file that wait at
/// the same time share one. The value is 0. `done` as for `bifolio_file_read_async`.
///
/// Threads: any, at the same time. Blocks: never.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_file_sync_async(
    file: *const bifolio_file,
    done: bifolio_done_function,
    context: *mut c_void,
) -> bifolio_result {
    guard(|| {
        // SAFETY: null, or a live handle.
        let file = unsafe { handle(file, "file")? };
        begin(file.file().sync_async(), done, context, |()| 0)
    })
}

/// An address of the caller's, used by one thread at a time.
struct Address<T>(*mut T);

// SAFETY: the caller lends what it points to until the call is complete.
unsafe impl<T> Send for Address<T> {}

/// Polls a call once, and leaves it to the thread if it has to wait.
fn begin<T: 'static>(
    future: FileFuture<T>,
    done: bifolio_done_function,
    context: *mut c_void,
    value_of: impl FnOnce(T) -> u64 + Send + 'static,
) -> Result<(), Failure>
where
    FileFuture<T>: Send,
{
    let done = done.ok_or(Failure::Null("done"))?;
    let completions = completions()?;
    let context = Address(context);
    let call = async move {
        let made = future.await;
        let context = context;
        let (result, value) = match made {
            Ok(output) => (bifolio_result::BIFOLIO_OK, value_of(output)),
            Err(error) => (result::remember(&Failure::Library(error)), 0),
        };
        // SAFETY: the caller's function, with the context that it was given for.
        unsafe { done(result, value, context.0) };
    };
    let task =
        Task { call: Mutex::new(Some(Box::pin(call))), is_queued: false.into(), completions };
    Arc::new(task).poll();
    Ok(())
}

type Call = Pin<Box<dyn Future<Output = ()> + Send>>;

/// A call that is not complete.
struct Task {
    call: Mutex<Option<Call>>,
    is_queued: AtomicBool,
    completions: &'static Completions,
}

impl fmt::Debug for Task {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Task").finish_non_exhaustive()
    }
}

impl Task {
    fn poll(self: Arc<Self>) {
        let waker = Waker::from(Arc::clone(&self));
        let mut call = locked(&self.call);
        let Some(future) = &mut *call else { return };
        let poll = || future.as_mut().poll(&mut Context::from_waker(&waker));
        // A panic is a defect, and ends the call without a result.
        let polled = catch_unwind(AssertUnwindSafe(poll));
        if !matches!(polled, Ok(Poll::Pending)) {
            let complete = call.take();
            // Its drop may close the file.
            drop(call);
            drop(complete);
        }
    }
}

impl Wake for Task {
    fn wake(self: Arc<Self>) {
        // AcqRel: pairs with the store in `run`, so that a wake-up after it queues the task again.
        if !self.is_queued.swap(true, Ordering::AcqRel) {
            let completions = self.completions;
            locked(&completions.queue).push_back(self);
            completions.changed.notify_one();
        }
    }
}

/// Calls that were woken, for the thread that polls them.
#[derive(Debug, Default)]
struct Completions {
    queue: Mutex<VecDeque<Arc<Task>>>,
    changed: Condvar,
}

impl Completions {
    fn run(&self) {
        loop {
            let task = {
                let mut queue = locked(&self.queue);
                loop {
                    if let Some(task) = queue.pop_front() {
                        break task;
                    }
                    queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
                }
            };
            // Release: before the poll, which sees what was done before an earlier wake-up.
            task.is_queued.store(false, Ordering::Release);
            task.poll();
        }
    }
}

/// Returns the queue of woken calls, whose thread is started once in a process: a child of a fork
/// has not inherited it, and its parent may have held the lock of the queue.
fn completions() -> Result<&'static Completions, Failure> {
    static CURRENT: Mutex<Option<(u32, &'static Completions)>> = Mutex::new(None);
    static STARTED_BY: AtomicU32 = AtomicU32::new(0);
    let (mut current, process) = (locked(&CURRENT), std::process::id());
    let known = current.filter(|(made_by, _)| *made_by == process);
    let (_, completions) =
        *current.insert(known.unwrap_or_else(|| (process, Box::leak(Box::default()))));
    // Relaxed: under the lock of `CURRENT`.
    if STARTED_BY.load(Ordering::Relaxed) != process {
        let thread = std::thread::Builder::new().name("bifolio-done".to_owned());
        let started = thread.spawn(|| completions.run());
        let refused =
            |error| Failure::Misuse(format!("no thread for calls that complete: {error}"));
        started.map_err(refused)?;
        STARTED_BY.store(process, Ordering::Relaxed);
    }
    Ok(completions)
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
