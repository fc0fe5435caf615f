//! An owner is kept until the kernel is done with its frames, whatever happens to its queue.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;
use std::time::Duration;

use super::super::ways::*;
use super::world::*;
use crate::io::*;

/// Counts owners that were dropped, and those among them that were dropped too early.
#[derive(Debug, Default)]
struct Witness {
    may_go: AtomicBool,
    dropped: AtomicU32,
    dropped_early: AtomicU32,
}

struct Owner(Arc<Witness>);

impl Drop for Owner {
    fn drop(&mut self) {
        // Acquire: pairs with the Release in the test; the pipe was written after it.
        let is_early = !self.0.may_go.load(Ordering::Acquire);
        // Relaxed: read after the thread has been joined.
        self.0.dropped_early.fetch_add(u32::from(is_early), Ordering::Relaxed);
        self.0.dropped.fetch_add(1, Ordering::Relaxed);
    }
}

/// Begins reads of a pipe, then ends the queue with `end` while they are in flight.
fn end_while_in_flight(end: fn(Queue<'_, (Frames, Owner)>)) {
    for world in worlds(4) {
        let pipe = Arc::new(Pipe::new());
        let backing: Arc<dyn DirectBacking> = Arc::clone(&pipe) as _;
        let witness = Arc::new(Witness::default());
        // Without threads nothing is ever in flight.
        // Relaxed: the thread that reads it is not started yet.
        witness.may_go.store(world.name == "no threads", Ordering::Relaxed);
        thread::scope(|scope| {
            let world = &world;
            let (backing, pipe, owners) = (&backing, &pipe, Arc::clone(&witness));
            let ending = scope.spawn(move || {
                let mut queue = world.engine.queue();
                for _ in 0..3 {
                    let owner = Owner(Arc::clone(&owners));
                    push_read(&mut queue, world, backing, 0, 1, owner);
                }
                // Starts them without waiting; without threads nothing is started.
                queue.complete(0, |_, _| panic!("nothing was written to the pipe"));
                while world.name == "threads" && pipe.called() < 3 {
                    thread::yield_now();
                }
                end(queue);
            });
            // A queue that does not wait has this long to be caught; a correct one only waits
            // longer.
            thread::sleep(Duration::from_millis(30));
            // Release: pairs with the Acquire in `Owner::drop`.
            witness.may_go.store(true, Ordering::Release);
            (0..3).for_each(|_| pipe.release());
            let _ = ending.join();
        });
        // Relaxed: the thread has been joined.
        let count = |counter: &AtomicU32| counter.load(Ordering::Relaxed);
        assert_eq!(count(&witness.dropped), 3, "{}", world.name);
        assert_eq!(count(&witness.dropped_early), 0, "{}: the frames were in use", world.name);
    }
}

#[test]
fn a_dropped_queue_waits_for_what_is_in_flight() {
    end_while_in_flight(|queue| drop(queue));
}

#[test]
fn a_queue_dropped_by_a_panic_waits_too() {
    end_while_in_flight(|queue| {
        let _queue = queue;
        std::panic::resume_unwind(Box::new("a panic of the caller"));
    });
}

#[test]
fn a_panic_in_the_callback_keeps_the_rest_in_the_queue() {
    for world in worlds(4) {
        let directory = disk_directory();
        let file: Arc<dyn DirectBacking> =
            Arc::new(read_write(&directory.path().join("f")).unwrap());
        let witness = Arc::new(Witness::default());
        // Relaxed: this thread.
        witness.may_go.store(true, Ordering::Relaxed);
        let mut queue = world.engine.queue();
        for _ in 0..9 {
            push_read(&mut queue, &world, &file, 0, 1, Owner(Arc::clone(&witness)));
        }
        let handing_out = std::panic::AssertUnwindSafe(|| {
            queue.complete(9, |_, _| std::panic::resume_unwind(Box::new("no more")));
        });
        assert!(std::panic::catch_unwind(handing_out).is_err());
        assert_eq!(queue.in_flight(), 8, "{}", world.name);
        push_read(&mut queue, &world, &file, 0, 1, Owner(Arc::clone(&witness)));
        assert_eq!(complete_all(&mut queue).len(), 9);
        // Relaxed: this thread.
        assert_eq!(witness.dropped.load(Ordering::Relaxed), 10);
    }
}

#[test]
fn transfers_pushed_but_not_started_are_dropped() {
    for world in worlds(4) {
        let directory = disk_directory();
        let path = directory.path().join("f");
        let file: Arc<dyn DirectBacking> = Arc::new(read_write(&path).unwrap());
        let mut queue = world.engine.queue();
        push_write(&mut queue, &world, &file, 0, &[1; PAGE], ());
        drop(queue);
        assert_eq!(file.len_bytes().unwrap(), 0, "{}", world.name);
    }
}
