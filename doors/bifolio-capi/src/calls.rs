//! Calls that complete later: reads, pins, writes, appends and syncs that do not block, each with a
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
use crate::pin::{bifolio_pin, check_unused, holding_owned};
use crate::result::{self, bifolio_result};
use bifolio::ErrorKind;
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

/// A function that is called when a call is complete, once, whatever has happened. `value` depends
/// on the call. If `result` is not `BIFOLIO_OK`, `bifolio_last_error` has the text, during the
/// function. The call uses neither its file nor its buffer any more.
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
/// Bytes in memory are copied to `buffer` at once. Others are read into memory of the library, and
/// copied when the call is complete. (`bifolio_file_pin_async` copies nothing.)
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
        let done = Done::new(done, context)?;
        // SAFETY: null, or a buffer of `length` bytes that is the caller's alone.
        let bytes = unsafe { bytes_mut(buffer, length, "buffer")? };
        match file.file().try_read_at(bytes, offset) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Ok(count) => {
                done.call(bifolio_result::BIFOLIO_OK, count as u64);
                return Ok(());
            }
            Err(error) => {
                done.call(result::remember(&Failure::Library(error)), 0);
                return Ok(());
            }
        }
        let target = Address(bytes.as_mut_ptr());
        let future = file.file().read_async(vec![0; length], offset);
        begin(future, done, move |bytes: Vec<u8>| {
            let target = target;
            // SAFETY: the caller's buffer, of at least so many bytes, until `done` is called.
            unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), target.0, bytes.len()) };
            bytes.len() as u64
        })
    })
}

/// Begins to pin `length` bytes at `offset`, which must lie in one folio and in the file. `pin` is
/// a struct that is zero; it holds the pin when `done` is called with `BIFOLIO_OK`, and must stay
/// where it is until then. No byte is copied. The value is 0. `done` as for
/// `bifolio_file_read_async`.
///
/// The pin may be released by any thread (`bifolio_pin_release`). It does not keep the handle from
/// being closed, but its bytes stay, and the file stays open in the cache.
///
/// Threads: any, at the same time. Blocks: never.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_file_pin_async(
    file: *const bifolio_file,
    offset: u64,
    length: usize,
    pin: *mut bifolio_pin,
    done: bifolio_done_function,
    context: *mut c_void,
) -> bifolio_result {
    guard(|| {
        // SAFETY: null, or a live handle.
        let file = unsafe { handle(file, "file")? };
        let done = Done::new(done, context)?;
        // SAFETY: null, or the caller's struct, which is zero or was used before.
        check_unused(unsafe { handle(pin, "pin")? }.data)?;
        let target = Address(pin);
        let future = file.file().pin_async(offset..offset.saturating_add(length as u64));
        begin(future, done, move |pin| {
            let target = target;
            // SAFETY: the caller's struct, which no other code uses until `done` is called.
            unsafe { target.0.write(holding_owned(pin)) };
            0
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
        let future = file.changeable()?.write_async(bytes, offset);
        begin(future, Done::new(done, context)?, |_| 0)
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
        let future = file.changeable()?.append_async(bytes);
        begin(future, Done::new(done, context)?, |position| position)
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
        begin(file.file().sync_async(), Done::new(done, context)?, |()| 0)
    })
}

/// An address of the caller's, used by one thread at a time.
struct Address<T>(*mut T);

// SAFETY: the caller lends what it points to until the call is complete.
unsafe impl<T> Send for Address<T> {}

/// Function of the caller for a call that is complete, with its context.
struct Done {
    function: unsafe extern "C" fn(bifolio_result, u64, *mut c_void),
    context: Address<c_void>,
}

impl Done {
    fn new(function: bifolio_done_function, context: *mut c_void) -> Result<Self, Failure> {
        let function = function.ok_or(Failure::Null("done"))?;
        Ok(Self { function, context: Address(context) })
    }

    fn call(self, result: bifolio_result, value: u64) {
        // SAFETY: the caller's function, with the context that it was given for.
        unsafe { (self.function)(result, value, self.context.0) };
    }
}

/// Polls a call once, and leaves it to the thread if it has to wait. `value_of` makes the value.
fn begin<T: 'static>(
    future: impl Future<Output = bifolio::Result<T>> + Send + 'static,
    done: Done,
    value_of: impl FnOnce(T) -> u64 + Send + 'static,
) -> Result<(), Failure> {
    let completions = completions()?;
    let future = Box::pin(async move { future.await.map(value_of) });
    let task = Task {
        call: Mutex::new(Some(Call { future, done })),
        is_queued: false.into(),
        completions,
    };
    Arc::new(task).poll();
    Ok(())
}

/// A call that is not complete.
struct Call {
    future: Pin<Box<dyn Future<Output = bifolio::Result<u64>> + Send>>,
    done: Done,
}

/// A call, shared by its wakers and the thread.
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
        let mut slot = locked(&self.call);
        let Some(call) = &mut *slot else { return };
        let poll = || call.future.as_mut().poll(&mut Context::from_waker(&waker));
        // A panic is a defect, and ends the call like any error.
        let ended = match catch_unwind(AssertUnwindSafe(poll)) {
            Ok(Poll::Pending) => return,
            Ok(Poll::Ready(made)) => Ok(made),
            Err(payload) => Err(payload),
        };
        let call = slot.take();
        drop(slot);
        let Some(Call { future, done }) = call else { return };
        // Before `done`, whose caller may want the last handle: the drop may close the file.
        let dropped = catch_unwind(AssertUnwindSafe(|| drop(future)));
        match ended.and_then(|made| dropped.map(|()| made)) {
            Ok(Ok(value)) => done.call(bifolio_result::BIFOLIO_OK, value),
            Ok(Err(error)) => done.call(result::remember(&Failure::Library(error)), 0),
            Err(payload) => done.call(result::remember_panic(payload.as_ref()), 0),
        }
    }
}

impl Wake for Task {
    fn wake(self: Arc<Self>) {
        // Release: pairs with the Acquire in `run`, whose poll sees what was done before.
        if !self.is_queued.swap(true, Ordering::Release) {
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
            // Acquire: pairs with the Release of each wake-up since the last poll, in `wake`. A
            // wake-up after this queues the task again. A read-modify-write, because a store would
            // see none of them.
            task.is_queued.swap(false, Ordering::Acquire);
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;
    use std::time::Duration;

    type Answers = mpsc::Sender<(bifolio_result, u64)>;

    unsafe extern "C" fn send(result: bifolio_result, value: u64, context: *mut c_void) {
        // SAFETY: the box of `answer_of`, which is given once. The call that sends is not over when
        // the answer has arrived, so it owns the sender.
        let answers = unsafe { Box::from_raw(context.cast::<Answers>()) };
        answers.send((result, value)).unwrap();
    }

    fn answer_of(
        future: impl Future<Output = bifolio::Result<u64>> + Send + 'static,
    ) -> bifolio_result {
        let (answers, answered) = mpsc::channel();
        let done = Done::new(Some(send), Box::into_raw(Box::new(answers)).cast()).unwrap();
        begin(future, done, |value| value).unwrap();
        let (result, value): (_, u64) = answered.recv_timeout(Duration::from_secs(10)).unwrap();
        assert_eq!(value, 0);
        assert!(answered.try_recv().is_err(), "`done` is called once");
        result
    }

    #[test]
    fn a_call_that_panics_is_complete_with_an_error() {
        assert_eq!(answer_of(async { panic!("planted") }), bifolio_result::BIFOLIO_ERROR_PANIC);
        let mut polls = 0;
        let later = std::future::poll_fn(move |context| {
            polls += 1;
            assert!(polls < 2, "planted");
            context.waker().wake_by_ref();
            Poll::Pending
        });
        assert_eq!(answer_of(later), bifolio_result::BIFOLIO_ERROR_PANIC, "on the thread");
    }

    #[test]
    fn a_future_that_panics_when_it_is_dropped_is_complete_with_an_error() {
        struct Panics;
        impl Drop for Panics {
            fn drop(&mut self) {
                panic!("planted");
            }
        }
        let panics = Box::new(Panics);
        let future = std::future::poll_fn(move |_| {
            let _held = &panics;
            Poll::Ready(Ok(0))
        });
        assert_eq!(answer_of(future), bifolio_result::BIFOLIO_ERROR_PANIC);
    }
}
