//! Executors for the tests of asynchronous calls: for one future, and for many on one thread.
//!
//! Both run in the calling thread, which sleeps while no task is woken.

use std::collections::VecDeque;
use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::{Arc, Condvar, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::thread;

/// Waker that unparks a thread.
struct Unpark(thread::Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Polls a future on this thread until it is ready.
pub fn block_on<F: Future>(future: F) -> F::Output {
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let mut future = pin!(future);
    loop {
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(output) => return output,
            Poll::Pending => thread::park(),
        }
    }
}

/// Numbers of the tasks that were woken.
#[derive(Debug, Default)]
pub struct Woken {
    /// In the order of their wake-ups; the thread that polls takes them out.
    pub numbers: Mutex<VecDeque<usize>>,
    /// Notified when a number is added.
    pub changed: Condvar,
}

impl Woken {
    /// Returns the waker of the task with this number.
    pub fn waker_of(self: &Arc<Self>, number: usize) -> Waker {
        Waker::from(Arc::new(Task { number, woken: Arc::clone(self) }))
    }
}

/// Waker of one of many tasks.
struct Task {
    number: usize,
    woken: Arc<Woken>,
}

impl Wake for Task {
    fn wake(self: Arc<Self>) {
        self.woken.numbers.lock().expect("no holder panics").push_back(self.number);
        self.woken.changed.notify_one();
    }
}

/// Polls all futures on this thread until they are ready, and passes on the output of each with its
/// number. A future for which `drops` returns `true` after a poll is dropped.
pub fn run_all<F: Future + Unpin>(
    futures: Vec<F>,
    mut drops: impl FnMut() -> bool,
    mut on_ready: impl FnMut(usize, F::Output),
) {
    let woken = Arc::new(Woken::default());
    let mut futures: Vec<_> = futures.into_iter().map(Some).collect();
    let mut left = futures.len();
    woken.numbers.lock().expect("no holder panics").extend(0..left);
    while left > 0 {
        let taken = {
            let mut numbers = woken.numbers.lock().expect("no holder panics");
            while numbers.is_empty() {
                numbers = woken.changed.wait(numbers).expect("no holder panics");
            }
            std::mem::take(&mut *numbers)
        };
        for number in taken {
            let Some(future) = &mut futures[number] else { continue };
            let waker = woken.waker_of(number);
            match Pin::new(future).poll(&mut Context::from_waker(&waker)) {
                Poll::Ready(output) => on_ready(number, output),
                Poll::Pending if drops() => {}
                Poll::Pending => continue,
            }
            futures[number] = None;
            left -= 1;
        }
    }
}
