//! Many threads, few rings, few workers: no thread waits forever, whichever is busy.

use std::sync::mpsc;
use std::sync::{Arc, Barrier};
use std::thread;

use super::super::ways::*;
use super::world::*;
use crate::error::Error;
use crate::io::engine::Engine;
use crate::io::*;
use crate::sys::probe::Feature;

const PAGES: u64 = 64;

fn file_of_numbers(directory: &tempfile::TempDir) -> Arc<dyn DirectBacking> {
    let file = read_write(&directory.path().join("f")).unwrap();
    for page in 0..PAGES {
        write(&file, &[page as u8; PAGE], page * PAGE as u64);
    }
    Arc::new(file)
}

/// Reads every page, `batch` at a time, and checks the bytes.
fn read_all(world: &World, file: &Arc<dyn DirectBacking>, first: u64, batch: u64) {
    let mut queue = world.engine.queue();
    for page in 0..PAGES {
        let page = (first + page) % PAGES;
        push_read(&mut queue, world, file, page * PAGE as u64, 1, page as u8);
        if page.is_multiple_of(batch) {
            queue.complete(1, check);
        }
    }
    queue.complete(usize::MAX, check);
}

fn check((frames, tag): (Frames, u8), answer: Result<usize, Error>) {
    assert_eq!(answer.unwrap(), PAGE);
    assert!(frames.bytes(PAGE) == [tag; PAGE]);
}

/// Returns `true` if the job will run now.
fn spawn(
    engine: &Engine,
    backing: &Arc<dyn DirectBacking>,
    job: impl FnOnce() + Send + 'static,
) -> bool {
    engine.spawn(lane_of(backing), Urgency::Now, job).is_ok()
}

#[test]
fn more_threads_than_rings_or_workers_all_get_their_bytes() {
    for world in worlds(8) {
        let directory = disk_directory();
        let file = file_of_numbers(&directory);
        thread::scope(|scope| {
            for thread in 0..40 {
                let (world, file) = (&world, &file);
                scope.spawn(move || read_all(world, file, thread, 1 + thread % 9));
            }
        });
        let counts = world.engine.counts();
        assert_eq!(counts.ring_transfers + counts.plain_transfers, 40 * PAGES);
    }
}

#[test]
fn jobs_on_every_worker_use_queues_without_deadlock() {
    for threads_max in [1, 2] {
        let world = World::with_threads("threads", &[Feature::IoUring], 8, threads_max);
        let world = Arc::new(world);
        let directory = disk_directory();
        let file = file_of_numbers(&directory);
        let (done, all_done) = mpsc::channel();
        // With the barrier every worker runs a job before any of them uses its queue.
        let barrier = Arc::new(Barrier::new(threads_max));
        for job in 0..threads_max as u64 {
            let (world, file, done) = (Arc::clone(&world), Arc::clone(&file), done.clone());
            let barrier = Arc::clone(&barrier);
            let engine = Arc::clone(&world.engine);
            let backing = Arc::clone(&file);
            let runs = spawn(&engine, &backing, move || {
                barrier.wait();
                read_all(&world, &file, job, 3);
                done.send(job).unwrap();
            });
            assert!(runs);
        }
        drop(done);
        assert_eq!(all_done.iter().count(), threads_max);
    }
}

#[test]
fn a_job_that_panics_does_not_end_its_worker() {
    let world = World::with_threads("threads", &[], 8, 1);
    let directory = disk_directory();
    let file = file_of_numbers(&directory);
    let panics = || std::panic::resume_unwind(Box::new("a job of the test"));
    assert!(spawn(&world.engine, &file, panics));
    let has_run_there = || {
        let (done, all_done) = mpsc::channel();
        let runs = spawn(&world.engine, &file, move || done.send(thread::current().id()).unwrap());
        runs && all_done.recv().unwrap() != thread::current().id()
    };
    // While the worker runs the first job, the next one is not run.
    while !has_run_there() {
        thread::yield_now();
    }
}

#[test]
fn a_dropped_engine_runs_the_spawned_jobs_first() {
    let world = World::with_threads("threads", &[], 8, 1);
    let directory = disk_directory();
    let file = file_of_numbers(&directory);
    let (done, all_done) = mpsc::channel();
    let spawned: Vec<_> = (0..100)
        .filter(|job| {
            let (job, done) = (*job, done.clone());
            spawn(&world.engine, &file, move || done.send(job).unwrap())
        })
        .collect();
    assert!(!spawned.is_empty());
    drop((world, done));
    let mut jobs: Vec<_> = all_done.try_iter().collect();
    jobs.sort_unstable();
    assert_eq!(jobs, spawned);
}

#[test]
fn the_last_owner_of_an_engine_may_be_one_of_its_jobs() {
    let World { engine, .. } = World::with_threads("threads", &[], 8, 2);
    let directory = disk_directory();
    let file = file_of_numbers(&directory);
    let (ours, theirs) = (mpsc::channel(), mpsc::channel());
    let last: Arc<Engine> = Arc::clone(&engine);
    let runs = spawn(&engine, &file, move || {
        // Until the test has dropped its reference.
        ours.1.recv().unwrap();
        assert_eq!(Arc::strong_count(&last), 1);
        drop(last);
        theirs.0.send(()).unwrap();
    });
    assert!(runs);
    drop(engine);
    ours.0.send(()).unwrap();
    theirs.1.recv().unwrap();
}
