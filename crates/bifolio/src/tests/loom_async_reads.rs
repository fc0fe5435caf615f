//! Asynchronous reads (`file/async_calls/handover.rs`): a future and the server that completes its
//! read; a submission and the server that is about to sleep or to end; a lock that a waker waits
//! for.

use super::world::{World, model, spawn};
use crate::file::async_calls::handover::{Call, Handover, Inbox, Rest};
use crate::page::{Entry, LockedFolio};
use crate::sync::{AtomicU32, Condvar, Mutex, Ordering};
use std::sync::Arc;
use std::task::{Poll, Wake, Waker};

/// A bell, and the waker that rings it.
#[derive(Debug, Default)]
pub(super) struct Bell {
    is_rung: Mutex<bool>,
    changed: Condvar,
}

impl Bell {
    fn ring(&self) {
        *self.is_rung.lock() = true;
        self.changed.notify_all();
    }

    pub(super) fn wait(&self) {
        let mut is_rung = self.is_rung.lock();
        while !*is_rung {
            self.changed.wait(&mut is_rung);
        }
        *is_rung = false;
    }
}

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.ring();
    }
}

pub(super) fn waker() -> (Arc<Bell>, Waker) {
    let bell = Arc::new(Bell::default());
    (Arc::clone(&bell), Waker::from(bell))
}

/// A task that polls again with another waker sleeps until that is called, and gets the item. Dies
/// with: a `poll` that keeps the first waker; a `complete` that returns none.
#[test]
fn loom_async_reads_the_last_waker_is_called() {
    model(|| {
        let (_, first) = waker();
        let handover = Arc::new(Handover::new(0, first));
        let server = Arc::clone(&handover);
        let server = loom::thread::spawn(move || {
            assert_eq!(server.with(|item| *item += 1), Some(()));
            server.complete(|item| *item += 1).into_iter().for_each(Waker::wake);
        });
        let (bell, last) = waker();
        let item = loop {
            match handover.poll(&last) {
                Poll::Ready(item) => break item,
                Poll::Pending => bell.wait(),
            }
        };
        assert_eq!(item, Some(2));
        assert_eq!(handover.poll(&last), Poll::Ready(None));
        server.join().unwrap();
    });
}

/// The item of a dropped future is taken once, and the server does not change it afterwards. Dies
/// with: an `abandon` that leaves the state; a `with` or `complete` that ignores it.
#[test]
fn loom_async_reads_a_dropped_future_takes_its_item() {
    model(|| {
        let (_, waker) = waker();
        let handover = Arc::new(Handover::new(Arc::new(AtomicU32::new(0)), waker));
        let server = Arc::clone(&handover);
        let server = loom::thread::spawn(move || {
            let add = |item: &mut Arc<AtomicU32>| {
                item.fetch_add(1, Ordering::Relaxed);
            };
            let _ = server.with(add);
            server.complete(add).is_some()
        });
        let item = handover.abandon().expect("only this thread takes it");
        let seen = item.load(Ordering::Relaxed);
        assert!(seen <= 2);
        let is_complete = server.join().unwrap();
        assert_eq!(item.load(Ordering::Relaxed), seen, "the item was changed after it was taken");
        assert_eq!(is_complete, seen == 2);
        assert!(handover.abandon().is_none());
    });
}

/// Serves an inbox: ends each read when it sees it. Returns how many it has seen.
fn serve(inbox: &Inbox<u32>, bell: &Bell, seen: &AtomicU32) {
    let mut ended = 0;
    loop {
        for _ in inbox.take() {
            seen.fetch_add(1, Ordering::Relaxed);
            ended += 1;
        }
        match inbox.rest(std::mem::take(&mut ended)) {
            Rest::Work => {}
            Rest::Sleep => bell.wait(),
            Rest::End => return,
        }
    }
}

/// Two submissions are both served, by one server or by two, whenever the first one ends. Dies
/// with: a `rest` that does not look at the queue, or that leaves the server as it is at the end.
#[test]
fn loom_async_reads_each_submission_finds_a_server() {
    model(|| {
        let shared = Arc::new((Inbox::default(), Bell::default(), AtomicU32::new(0)));
        let submit = |shared: &Arc<(Inbox<u32>, Bell, AtomicU32)>| match shared.0.submit(7) {
            Call::Start => serve(&shared.0, &shared.1, &shared.2),
            Call::Ring => shared.1.ring(),
            Call::Nothing => {}
        };
        let other = Arc::clone(&shared);
        let other = loom::thread::spawn(move || submit(&other));
        submit(&shared);
        other.join().unwrap();
        assert_eq!(shared.2.load(Ordering::Relaxed), 2);
    });
}

/// A server that sleeps with a read outstanding hears of it again. Dies with: a `submit_again`
/// that does not ring, or a `rest` that sleeps with a queue.
#[test]
fn loom_async_reads_a_sleeping_server_hears_the_bell() {
    model(|| {
        let shared = Arc::new((Inbox::default(), Bell::default()));
        assert_eq!(shared.0.submit(1), Call::Start);
        let unlocker = Arc::clone(&shared);
        let unlocker = loom::thread::spawn(move || {
            if unlocker.0.submit_again(2) == Call::Ring {
                unlocker.1.ring();
            }
        });
        let mut seen = 0;
        let mut ended = 0;
        loop {
            for read in shared.0.take() {
                seen += read;
                ended += usize::from(read == 2);
            }
            match shared.0.rest(std::mem::take(&mut ended)) {
                Rest::Work => {}
                Rest::Sleep => shared.1.wait(),
                Rest::End => break,
            }
        }
        assert_eq!(seen, 3);
        unlocker.join().unwrap();
    });
}

/// A submission wakes a server that sleeps with another read outstanding. Dies with: a `submit`
/// that does not ring.
#[test]
fn loom_async_reads_a_submission_wakes_a_sleeping_server() {
    model(|| {
        let shared = Arc::new((Inbox::default(), Bell::default()));
        assert_eq!(shared.0.submit(1), Call::Start);
        let other = Arc::clone(&shared);
        let other = loom::thread::spawn(move || {
            if other.0.submit(2) == Call::Ring {
                other.1.ring();
            }
        });
        // The first read waits for the second.
        let (mut seen, mut ended) = (0, 0);
        loop {
            for read in shared.0.take() {
                seen += read;
                ended += if read == 2 { 2 } else { 0 };
            }
            match shared.0.rest(std::mem::take(&mut ended)) {
                Rest::Work => {}
                Rest::Sleep => shared.1.wait(),
                Rest::End => break,
            }
        }
        assert_eq!(seen, 3);
        other.join().unwrap();
    });
}

/// A wake-up that comes when its read has ended does not keep the next submission from a server.
/// Dies with: a `submit_again` that queues although nothing is outstanding.
#[test]
fn loom_async_reads_a_late_wake_up_is_no_server() {
    model(|| {
        let shared = Arc::new((Inbox::default(), Bell::default(), AtomicU32::new(0)));
        let late = Arc::clone(&shared);
        let late = loom::thread::spawn(move || {
            if late.0.submit_again(8) == Call::Ring {
                late.1.ring();
            }
        });
        for _ in 0..2 {
            let mut ended = 0;
            assert_eq!(shared.0.submit(7), Call::Start, "the server before has ended");
            loop {
                for read in shared.0.take() {
                    ended += usize::from(read == 7);
                    shared.2.fetch_add(u32::from(read == 7), Ordering::Relaxed);
                }
                match shared.0.rest(std::mem::take(&mut ended)) {
                    Rest::Work => {}
                    Rest::Sleep => shared.1.wait(),
                    Rest::End => break,
                }
            }
        }
        late.join().unwrap();
        assert_eq!(shared.2.load(Ordering::Relaxed), 2);
        assert!(shared.0.take().is_empty(), "a wake-up of nothing is kept");
    });
}

/// A server that could not be started gives up what is queued, and the next submission starts
/// another. Dies with: a `give_up` that leaves the server as it is, or the queue.
#[test]
fn loom_async_reads_a_server_that_did_not_start_gives_up() {
    model(|| {
        let shared = Arc::new((Inbox::default(), Bell::default(), AtomicU32::new(0)));
        let other = Arc::clone(&shared);
        let other = loom::thread::spawn(move || match other.0.submit(7) {
            Call::Start => serve(&other.0, &other.1, &other.2),
            Call::Ring => other.1.ring(),
            Call::Nothing => {}
        });
        let given_up = match shared.0.submit(7) {
            Call::Start => shared.0.give_up().len() as u32,
            Call::Ring => {
                shared.1.ring();
                0
            }
            Call::Nothing => 0,
        };
        other.join().unwrap();
        assert_eq!(shared.2.load(Ordering::Relaxed) + given_up, 2, "each is served, or given up");
    });
}

/// A waker that was registered while the lock was held is called after the release, with the lock
/// free. Dies with: `try_lock_or_wake` that registers after the exchange; a `release` that does
/// not call the wakers.
#[test]
fn loom_async_reads_a_waker_waits_for_a_folio_lock() {
    model(|| {
        let world = World::new(1, 0, 1);
        {
            let folio = world.allocate(0);
            let locked = folio.lock();
            let for_table = folio.try_clone().expect("the count is far from its limit");
            world.mapping.insert(&world.folios, &locked, for_table, Entry::HOLE).unwrap();
            locked.detach_lock();
            let _ = folio.into_id();
        }
        let holder = spawn(&world, |world| {
            let folio = world.find(0).expect("the folio is in the table");
            drop::<LockedFolio<'_>>(folio.adopt_lock());
        });
        let (bell, waker) = waker();
        let folio = world.find(0).expect("the folio is in the table");
        let lock = loop {
            match folio.try_lock_or_wake(waker.clone()) {
                Some(lock) => break lock,
                None => bell.wait(),
            }
        };
        drop(lock);
        holder.join().unwrap();
        std::mem::forget(folio);
    });
}
