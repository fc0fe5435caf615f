//! Asynchronous calls in runtimes of one thread per core: the tasks of a thread stay on it, and
//! share a file with those of the others. A task is woken by a thread of the cache.

use std::thread;

use crate::support::{PAGE, assert_same, directory, writable};
use bifolio::{Cache, File};
use bifolio_testing::fill_bytes;

const THREADS: u64 = 3;
const TASKS: u64 = 200;
const BYTES: u64 = 5000;

/// Writes bytes of a task, reads them back and pins their first page.
async fn write_and_read(file: File, task: u64) {
    let at = task * BYTES;
    let bytes = fill_bytes(at, BYTES as usize);
    let buffer = file.write_async(bytes.clone(), at).await.unwrap();
    if task.is_multiple_of(50) {
        file.sync_async().await.unwrap();
    }
    assert_same(&file.read_async(buffer, at).await.unwrap(), &bytes);
    let end = (at / PAGE + 1) * PAGE;
    let page = file.pin_async(at..end).await.unwrap();
    assert_same(&page.to_vec(), &bytes[..(end - at) as usize]);
}

/// Runs tasks on some threads, each with a runtime of its own that `run` makes.
fn share_a_file(run: impl Fn(&File, Vec<u64>) + Sync) {
    let directory = directory();
    let cache = Cache::builder().memory(1 << 20).dirty_max(256 << 10).build().unwrap();
    let file = cache.open(directory.path().join("file"), &writable().create(true)).unwrap();
    thread::scope(|scope| {
        let (file, run) = (&file, &run);
        for thread in 0..THREADS {
            let tasks = (0..TASKS).map(|number| number * THREADS + thread).collect();
            scope.spawn(move || run(file, tasks));
        }
    });
    assert_eq!(file.len(), THREADS * TASKS * BYTES);
    file.close().unwrap();
}

#[test]
fn threads_with_a_tokio_runtime_each_share_a_file() {
    share_a_file(|file, tasks| {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let local = tokio::task::LocalSet::new();
        let spawn = |task| local.spawn_local(write_and_read(file.clone(), task));
        let started: Vec<_> = tasks.into_iter().map(spawn).collect();
        runtime.block_on(local.run_until(async {
            for task in started {
                task.await.unwrap();
            }
        }));
    });
}

#[test]
fn threads_with_a_monoio_runtime_each_share_a_file() {
    // The driver of monoio that is built here is that of io_uring.
    let made = monoio::RuntimeBuilder::<monoio::IoUringDriver>::new().build();
    if let Err(error) = made {
        return bifolio_testing::skip("io-uring", error);
    }
    share_a_file(|file, tasks| {
        let builder = monoio::RuntimeBuilder::<monoio::IoUringDriver>::new();
        builder.build().unwrap().block_on(async {
            let spawn = |task| monoio::spawn(write_and_read(file.clone(), task));
            let started: Vec<_> = tasks.into_iter().map(spawn).collect();
            for task in started {
                task.await;
            }
        });
    });
}
