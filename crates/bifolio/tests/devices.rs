//! One device beside another: what is full, broken or hung holds up its own files and no others.
//!
//! Progress is asserted with a wide margin, far below what a call waits for a device that does
//! not answer, and far above what a loaded machine takes.

mod support;

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use bifolio::{
    Backing, Cache, Feature, Features, File, IoRequest, IoSource, IoTarget, ReadRequest, Submission,
};
use bifolio_testing::{Call, Fault, FaultyBacking, Gate, MemoryBacking, fill_bytes};
use support::{PAGE, assert_same, directory, open, random_file, read, writable};

/// Nothing that is expected to end takes so long.
const TEST_MAX: Duration = Duration::from_secs(45);

fn faulty_memory(length: usize) -> (Arc<MemoryBacking>, Arc<FaultyBacking>) {
    let memory = Arc::new(MemoryBacking::new(vec![0; length]));
    (memory.clone(), Arc::new(FaultyBacking::over(memory)))
}

/// Runs `work` on a thread; `None` if it does not end in time. (The thread is left to itself then.)
fn in_time<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    let (done, answer) = mpsc::channel();
    thread::spawn(move || done.send(work()));
    answer.recv_timeout(TEST_MAX).ok()
}

/// Storage whose reads wait for ever in the kernel, until `hung` is dropped: those of an empty
/// pipe.
#[derive(Debug)]
struct Pipe {
    reader: io::PipeReader,
    memory: MemoryBacking,
    is_open: AtomicBool,
}

impl Pipe {
    fn new(length: usize) -> (Arc<Self>, io::PipeWriter) {
        let (reader, writer) = io::pipe().unwrap();
        let memory = MemoryBacking::new(vec![0; length]);
        (Arc::new(Self { reader, memory, is_open: AtomicBool::new(false) }), writer)
    }
}

impl Backing for Pipe {
    fn read_at(&self, target: &mut IoTarget<'_>, position: u64) -> io::Result<usize> {
        self.memory.read_at(target, position)
    }

    fn write_at(&self, source: &IoSource<'_>, position: u64) -> io::Result<usize> {
        self.memory.write_at(source, position)
    }

    fn submission(&self, request: &IoRequest) -> Option<Submission<'_>> {
        let is_hung = !self.is_open.load(Ordering::Relaxed);
        is_hung.then(|| Submission::new(self.reader.as_fd(), request.length_bytes))
    }

    fn completed(&self, _: &IoRequest, _: io::Result<usize>) -> io::Result<usize> {
        Err(io::ErrorKind::Interrupted.into())
    }

    fn sync_data(&self) -> io::Result<()> {
        Ok(())
    }

    fn sync_all(&self) -> io::Result<()> {
        Ok(())
    }

    fn len_bytes(&self) -> io::Result<u64> {
        self.memory.len_bytes()
    }

    fn set_len(&self, length_bytes: u64) -> io::Result<()> {
        self.memory.set_len(length_bytes)
    }

    fn describe(&self) -> String {
        "a pipe".to_owned()
    }
}

#[test]
fn hung_reads_in_the_kernel_leave_other_devices_a_way() {
    if !Features::probe(&[]).has(Feature::IoUring) {
        return eprintln!("skipped: there is no io_uring here");
    }
    let cache = Cache::builder().memory(64 << 20).readahead_bytes_max(0).build().unwrap();
    let directory = directory();
    let (path, bytes) = random_file(&directory, "healthy", 1 << 20);
    let file = open(&cache, &path);
    let (pipe, writer) = Pipe::new(1 << 20);
    let hung = cache.open_backing(pipe.clone(), &writable()).unwrap();
    let two_pages = |file: &File, start: u64| {
        let mut pages = [[0; PAGE as usize]; 2];
        let [first, second] = &mut pages;
        let mut requests =
            [ReadRequest::new(start, first), ReadRequest::new(start + 16 * PAGE, second)];
        file.read_many(&mut requests).unwrap();
        requests.iter().for_each(|request| assert!(request.result.is_ok()));
        pages
    };
    let mut readers = Vec::new();
    // More than there are rings.
    for reader in 0..40 {
        let hung = hung.clone();
        readers.push(thread::spawn(move || two_pages(&hung, reader % 16 * PAGE)));
    }
    thread::sleep(Duration::from_millis(200));
    let found = in_time(move || [0, 3, 5].map(|page| two_pages(&file, page * PAGE)));
    pipe.is_open.store(true, Ordering::Relaxed);
    drop(writer);
    for reader in readers {
        reader.join().unwrap();
    }
    let found = found.expect("the device that answers is read");
    assert_same(&found[1][1], &bytes[19 * PAGE as usize..20 * PAGE as usize]);
}

#[test]
fn hung_readahead_leaves_other_devices_their_workers() {
    let cache = Cache::builder().memory(64 << 20).build().unwrap();
    let gate = Gate::new();
    let hang = || {
        let (_, hung) = faulty_memory(1 << 20);
        hung.inject(Fault::on(Call::Read).forever().held(&gate));
        let file = cache.open_backing(hung, &writable()).unwrap();
        thread::spawn(move || read(&file, 0, 200 << 10))
    };
    let readers: Vec<_> = (0..24).map(|_| hang()).collect();
    gate.wait_for_arrivals(16);
    let bytes = fill_bytes(3, 8 << 20);
    let memory = Arc::new(MemoryBacking::new(bytes.clone()));
    let file = cache.open_backing(memory, &writable()).unwrap();
    let found = in_time(move || {
        let parts = (0..128).map(|part| read(&file, part * (64 << 10), 64 << 10));
        parts.collect::<Vec<_>>().concat()
    });
    gate.open();
    readers.into_iter().for_each(|reader| drop(reader.join().unwrap()));
    assert_same(&found.expect("the device that answers is read"), &bytes);
}
