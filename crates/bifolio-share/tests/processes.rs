//! Owners and clients in real processes: right bytes under evictions and writes, hits without the
//! owner, and the end of either side at any moment.
//!
//! A test runs itself again as another process, with a role in its environment. A client reports by
//! its exit status.
//!
//! # Safety
//! Forks a process that then makes a few calls and ends.
#![allow(unsafe_code)]

use bifolio::{Cache, OpenOptions};
use bifolio_share::{
    APPEND_BYTES_MAX, ErrorKind, Options, ReadRequest, Server, SharedCache, SharedFile,
};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use std::{env, fs, thread};
use tempfile::TempDir;

const ROLE: &str = "BIFOLIO_SHARE_ROLE";
const DIRECTORY: &str = "BIFOLIO_SHARE_DIRECTORY";
const PAGE: u64 = 4096;

fn directory() -> TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// Starts the test `name` of this binary in another process, as `role`.
fn start(name: &str, role: &str, directory: &Path) -> Child {
    Command::new(env::current_exe().unwrap())
        .args([name, "--exact", "--nocapture", "--test-threads=1"])
        .env(ROLE, role)
        .env(DIRECTORY, directory)
        .stdout(Stdio::null())
        .spawn()
        .unwrap()
}

/// Runs `body` and returns `true` if this process is another one, which has `role`.
fn plays(role: &str, body: impl FnOnce(&Path)) -> bool {
    let is_mine = env::var(ROLE).is_ok_and(|mine| mine == role);
    if is_mine {
        body(Path::new(&env::var(DIRECTORY).unwrap()));
    }
    is_mine
}

fn finish(children: Vec<Child>) {
    for mut child in children {
        assert!(child.wait().unwrap().success(), "a client failed");
    }
}

#[track_caller]
fn wait_until(what: &str, is_so: impl Fn() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < Duration::from_secs(20), "{what}: not in 20 seconds");
        thread::sleep(Duration::from_millis(1));
    }
}

/// Makes a file of `pages` pages whose words are their positions.
fn numbered_file(directory: &Path, pages: u64) {
    let words = (0..pages * PAGE / 8).map(|word| word * 8);
    let bytes: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
    fs::write(directory.join("file"), bytes).unwrap();
}

fn owner(directory: &Path, memory_bytes: u64) -> (Cache, Server) {
    let cache = Cache::builder().memory(memory_bytes).shared(true).build().unwrap();
    let server = Server::start(&cache, directory.join("socket")).unwrap();
    (cache, server)
}

fn client(directory: &Path) -> (SharedCache, SharedFile) {
    let cache = SharedCache::connect(directory.join("socket")).unwrap();
    let file = cache.open(directory.join("file"), &Options::new()).unwrap();
    (cache, file)
}

/// Reads `length` bytes at `position` and checks that the words are their positions.
fn check_numbered(file: &SharedFile, position: u64, length: usize) {
    let mut bytes = vec![0xEE; length];
    assert_eq!(file.read_at(&mut bytes, position).unwrap(), length, "at {position}");
    for (word, found) in (position..).step_by(8).zip(bytes.as_chunks::<8>().0) {
        assert_eq!(u64::from_le_bytes(*found), word, "at {position}");
    }
}

/// A cache of 1 MiB for a file of 8 MiB, whose bound changes meanwhile: frames and tables are given
/// back under the reads of three processes.
#[test]
fn clients_read_right_bytes_while_pages_are_evicted() {
    const NAME: &str = "clients_read_right_bytes_while_pages_are_evicted";
    const PAGES: u64 = 2048;
    let reads = |directory: &Path| {
        let (_cache, file) = client(directory);
        let mut random = fastrand::Rng::with_seed(std::process::id().into());
        for _ in 0..20_000 {
            let length = [8, 64, 4096, 4096 - 8, 20_000, 100_000][random.usize(..6)];
            let room = PAGES * PAGE - length as u64;
            let wanted = if random.bool() { room } else { room / 32 };
            check_numbered(&file, random.u64(..=wanted) & !7, length);
        }
        let mut bytes = [0; 100];
        let end = PAGES * PAGE;
        assert_eq!(file.read_at(&mut bytes, end - 40).unwrap(), 40);
        assert_eq!(file.read_at(&mut bytes, end).unwrap(), 0);
        assert_eq!(file.read_at(&mut bytes, end + PAGE).unwrap(), 0);
        assert_eq!(file.len_bytes().unwrap(), end);
    };
    if plays("client", reads) {
        return;
    }
    let directory = directory();
    numbered_file(directory.path(), PAGES);
    let (cache, server) = owner(directory.path(), 1 << 20);
    let mut clients: Vec<_> = (0..3).map(|_| start(NAME, "client", directory.path())).collect();
    let mut is_small = false;
    while clients.iter_mut().any(|client| client.try_wait().unwrap().is_none()) {
        is_small = !is_small;
        cache.set_memory(if is_small { 512 << 10 } else { 1 << 20 }).unwrap();
        thread::sleep(Duration::from_millis(5));
    }
    finish(clients);
    let stats = cache.stats();
    assert!(stats.evictions.folios > 1000, "{stats:?}");
    wait_until("the clients are gone", || server.clients() == 0);
}

/// Pages that are all of one number, which the owner changes meanwhile.
#[test]
fn a_client_never_sees_half_a_write_of_the_owner() {
    const NAME: &str = "a_client_never_sees_half_a_write_of_the_owner";
    let reads = |directory: &Path| {
        let (_cache, file) = client(directory);
        let mut last = 0;
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_secs(2) {
            let mut page = [0; PAGE as usize];
            assert_eq!(file.read_at(&mut page, PAGE).unwrap(), page.len());
            let (words, _) = page.as_chunks::<8>();
            assert!(words.iter().all(|word| *word == words[0]), "torn");
            let number = u64::from_le_bytes(words[0]);
            assert!(number >= last, "{number} after {last}");
            last = number;
        }
        assert!(last > 0, "no write was seen");
    };
    if plays("client", reads) {
        return;
    }
    let directory = directory();
    fs::write(directory.path().join("file"), vec![0; 3 * PAGE as usize]).unwrap();
    let (cache, _server) = owner(directory.path(), 1 << 20);
    let options = OpenOptions::new().read(true).write(true);
    let file = cache.open(directory.path().join("file"), &options).unwrap();
    let mut clients = vec![start(NAME, "client", directory.path())];
    for number in 1_u64.. {
        let page: Vec<u8> = number.to_le_bytes().repeat(PAGE as usize / 8);
        file.write_all_at(&page, PAGE).unwrap();
        if number.is_multiple_of(64) {
            let _ = file.evict(..).unwrap();
            if clients[0].try_wait().unwrap().is_some() {
                break;
            }
        }
    }
    finish(clients);
}

#[test]
fn hits_of_a_client_call_nothing_of_the_owner() {
    let directory = directory();
    numbered_file(directory.path(), 64);
    let (cache, _server) = owner(directory.path(), 1 << 20);
    let (_client, file) = client(directory.path());
    let read_all = || (0..64).for_each(|page| check_numbered(&file, page * PAGE, 4096));
    read_all();
    let before = cache.stats();
    for _ in 0..100 {
        read_all();
    }
    let after = cache.stats();
    assert_eq!(before.reads, after.reads, "the owner was asked");
}

/// A client that reads in order has readahead, although the owner does not see its hits.
#[test]
fn a_scan_of_a_client_is_read_ahead() {
    const PAGES: u64 = 4096;
    let directory = directory();
    numbered_file(directory.path(), PAGES);
    let (cache, _server) = owner(directory.path(), 8 << 20);
    let (_client, file) = client(directory.path());
    let own = cache.open(directory.path().join("file"), &OpenOptions::new()).unwrap();
    let transfers_of = |read: &dyn Fn(u64)| {
        let _ = cache.evict_all().unwrap();
        let before = cache.stats().storage.read_requests;
        (0..PAGES).for_each(|page| read(page * PAGE));
        cache.stats().storage.read_requests - before
    };
    let of_owner = transfers_of(&|at| own.read_exact_at(&mut [0; 4096], at).unwrap());
    let of_client = transfers_of(&|at| check_numbered(&file, at, 4096));
    assert!(of_client <= 2 * of_owner, "{of_client} transfers, {of_owner} of the owner's scan");
}

/// Pages that only a client uses stay, because it notes their use.
#[test]
fn pages_that_a_client_uses_are_marked() {
    const USED: u64 = 32;
    let directory = directory();
    numbered_file(directory.path(), 2048);
    let (cache, _server) = owner(directory.path(), 1 << 20);
    let (_client, file) = client(directory.path());
    let own = cache.open(directory.path().join("file"), &OpenOptions::new()).unwrap();
    let mut hits = 0;
    for page in 0..20_000_u64 {
        let before = cache.stats().reads;
        check_numbered(&file, page % USED * PAGE, 64);
        hits += u64::from(cache.stats().reads == before);
        own.read_exact_at(&mut [0; 8], (USED + page % (2048 - USED)) * PAGE).unwrap();
    }
    assert!(hits > 18_000, "{hits} hits of 20000");
}

#[test]
fn the_end_of_an_owner_is_an_error_at_once() {
    const NAME: &str = "the_end_of_an_owner_is_an_error_at_once";
    let serves = |directory: &Path| {
        let _owner = owner(directory, 1 << 20);
        fs::write(directory.join("ready"), "").unwrap();
        thread::sleep(Duration::from_secs(60));
    };
    if plays("owner", serves) {
        return;
    }
    let directory = directory();
    numbered_file(directory.path(), 64);
    for _ in 0..5 {
        let mut owner = start(NAME, "owner", directory.path());
        wait_until("the owner is ready", || directory.path().join("ready").exists());
        let (cache, file) = client(directory.path());
        let threads: Vec<_> = (0..4)
            .map(|thread: u64| {
                let file = cache.open(directory.path().join("file"), &Options::new()).unwrap();
                thread::spawn(move || {
                    let mut random = fastrand::Rng::with_seed(thread);
                    loop {
                        let mut bytes = [0; 64];
                        let position = random.u64(..63) * PAGE;
                        match file.read_at(&mut bytes, position) {
                            Ok(64) => assert_eq!(bytes[..8], position.to_le_bytes()),
                            Ok(count) => panic!("{count} bytes"),
                            Err(error) => return error,
                        }
                    }
                })
            })
            .collect();
        thread::sleep(Duration::from_millis(50));
        check_numbered(&file, 0, 4096);
        owner.kill().unwrap();
        owner.wait().unwrap();
        let killed = Instant::now();
        for thread in threads {
            assert_eq!(thread.join().unwrap().kind(), ErrorKind::OwnerGone);
        }
        assert!(killed.elapsed() < Duration::from_secs(1), "{:?}", killed.elapsed());
        assert!(!cache.is_connected());
        assert_eq!(file.len_bytes().unwrap_err().kind(), ErrorKind::OwnerGone);
        let error = cache.open(directory.path().join("file"), &Options::new()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::OwnerGone);
        fs::remove_file(directory.path().join("ready")).unwrap();
    }
}

#[test]
fn a_killed_client_leaves_nothing() {
    const NAME: &str = "a_killed_client_leaves_nothing";
    let reads = |directory: &Path| {
        let (_cache, file) = client(directory);
        let mut random = fastrand::Rng::new();
        loop {
            check_numbered(&file, random.u64(..2047) * PAGE, 4096);
        }
    };
    if plays("client", reads) {
        return;
    }
    let directory = directory();
    numbered_file(directory.path(), 2048);
    let (cache, server) = owner(directory.path(), 1 << 20);
    let descriptors = || fs::read_dir("/proc/self/fd").unwrap().count();
    let before = descriptors();
    let mut random = fastrand::Rng::with_seed(1);
    for _ in 0..20 {
        let mut clients: Vec<_> = (0..2).map(|_| start(NAME, "client", directory.path())).collect();
        thread::sleep(Duration::from_millis(random.u64(5..80)));
        for client in &mut clients {
            client.kill().unwrap();
            client.wait().unwrap();
        }
        wait_until("no client is left", || server.clients() == 0);
    }
    wait_until("no file is left", || cache.files().is_empty());
    wait_until("no descriptor is left", || descriptors() <= before);
    cache.close().unwrap();
}

#[test]
fn refusals_have_reasons() {
    let directory = directory();
    numbered_file(directory.path(), 1);
    let socket = directory.path().join("socket");
    let private = Cache::builder().memory(1 << 20).shared(false).build().unwrap();
    let error = Server::start(&private, &socket).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Call(bifolio::ErrorKind::Config), "{error}");
    let error = SharedCache::connect(&socket).unwrap_err();
    assert_eq!((error.kind(), error.raw_os_error()), (ErrorKind::System, Some(2)), "{error}");
    let (cache, server) = owner(directory.path(), 1 << 20);
    let error = Server::start(&cache, &socket).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::System, "{error}");
    let (client, _file) = client(directory.path());
    let error = client.open(directory.path().join("none"), &Options::new()).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(2), "{error}");
    let error = client.open(directory.path(), &Options::new()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Call(bifolio::ErrorKind::NotRegular), "{error}");
    let others: Vec<_> = (1..64).map(|_| SharedCache::connect(&socket).unwrap()).collect();
    let error = SharedCache::connect(&socket).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Refused, "{error}");
    drop(others);
    wait_until("the others are gone", || server.clients() == 1);
    SharedCache::connect(&socket).unwrap();
    drop(server);
    wait_until("the owner is gone", || !client.is_connected());
    assert!(!socket.exists());
}

#[test]
fn batches_read_what_single_reads_do() {
    let directory = directory();
    numbered_file(directory.path(), 512);
    let (cache, _server) = owner(directory.path(), 1 << 20);
    let (_client, file) = client(directory.path());
    let end = 512 * PAGE;
    let mut random = fastrand::Rng::with_seed(1);
    for _ in 0..50 {
        if random.bool() {
            let _ = cache.evict_all().unwrap();
        }
        let lengths = [0, 8, 100, 4096, 9000, 70_000];
        let wanted: Vec<(u64, usize)> = (0..random.usize(0..100))
            .map(|_| (random.u64(..=end + 10), lengths[random.usize(..6)]))
            .collect();
        let mut buffers: Vec<_> = wanted.iter().map(|(_, length)| vec![0xEE; *length]).collect();
        let mut requests: Vec<_> = buffers
            .iter_mut()
            .zip(&wanted)
            .map(|(buffer, (position, _))| ReadRequest::new(buffer, *position))
            .collect();
        file.read_many(&mut requests).unwrap();
        let counts: Vec<_> = requests.into_iter().map(|request| request.result.unwrap()).collect();
        for (((position, length), buffer), count) in wanted.into_iter().zip(buffers).zip(counts) {
            let mut expected = vec![0; length];
            let read = file.read_at(&mut expected, position).unwrap();
            assert_eq!(count, read, "{length} at {position}");
            assert!(buffer[..count] == expected[..count], "{length} at {position}");
        }
    }
}

#[test]
fn pins_keep_pages_until_they_are_dropped() {
    let directory = directory();
    numbered_file(directory.path(), 2048);
    let (cache, server) = owner(directory.path(), 1 << 20);
    let (client, file) = client(directory.path());
    let pins: Vec<_> =
        (0..20).map(|page| file.pin(page * 7 * PAGE..(page * 7 + 1) * PAGE).unwrap()).collect();
    let own = cache.open(directory.path().join("file"), &OpenOptions::new()).unwrap();
    for page in 0..2048 {
        own.read_exact_at(&mut [0; 8], page * PAGE).unwrap();
    }
    let kept = own.evict(..).unwrap().kept;
    assert_eq!(kept.referenced, 20, "{kept:?}");
    for (page, pin) in (0..).zip(&pins) {
        let mut word = [0; 8];
        pin.copy_to(4088, &mut word).unwrap();
        assert_eq!(u64::from_le_bytes(word), page * 7 * PAGE + 4088);
        assert!(pin.copy_to(4089, &mut word).is_err(), "past its end");
    }
    assert!(file.pin(4000..5000).is_err(), "in two folios");
    drop(pins);
    assert_eq!(own.evict(..).unwrap().kept.referenced, 0);
    let pin = file.pin(0..PAGE).unwrap();
    drop(server);
    let mut word = [7; 8];
    assert_eq!(pin.copy_to(8, &mut word).unwrap_err().kind(), ErrorKind::OwnerGone);
    assert!(!client.is_connected());
    drop(own);
    cache.close().unwrap();
}

/// A client writes and ends without a sync: the writes are the owner's. Another client sees them.
#[test]
fn writes_survive_their_client() {
    const NAME: &str = "writes_survive_their_client";
    let writes = |directory: &Path| {
        let cache = SharedCache::connect(directory.join("socket")).unwrap();
        let file = cache.open(directory.join("file"), &Options::new().write(true)).unwrap();
        let bytes: Vec<u8> = (0..100_000_u32).map(|byte| byte as u8).collect();
        file.write_all_at(&bytes, 5000).unwrap();
        assert_eq!(file.len_bytes().unwrap(), 105_000);
        for number in 0..100_u64 {
            let position = file.append(&number.to_le_bytes()).unwrap();
            assert_eq!(position, 105_000 + number * 8);
        }
        file.set_len(200_000).unwrap();
        let reader = cache.open(directory.join("file"), &Options::new()).unwrap();
        assert!(reader.write_all_at(&[1], 0).is_err(), "not open for writing");
        assert!(file.append(&vec![0; APPEND_BYTES_MAX + 1]).is_err());
        // Neither a sync nor a close.
        std::process::abort();
    };
    if plays("client", writes) {
        return;
    }
    let directory = directory();
    fs::write(directory.path().join("file"), "").unwrap();
    let (cache, server) = owner(directory.path(), 1 << 20);
    let status = start(NAME, "client", directory.path()).wait().unwrap();
    assert_eq!(status.signal(), Some(6), "{status}");
    wait_until("the client is gone", || server.clients() == 0);
    let client = SharedCache::connect(directory.path().join("socket")).unwrap();
    let options = Options::new().write(true);
    let file = client.open(directory.path().join("file"), &options).unwrap();
    let mut found = vec![0; 200_001];
    assert_eq!(file.read_at(&mut found, 0).unwrap(), 200_000);
    let mut expected = vec![0; 5000];
    expected.extend((0..100_000_u32).map(|byte| byte as u8));
    expected.extend((0..100_u64).flat_map(u64::to_le_bytes));
    expected.resize(200_000, 0);
    assert!(found[..200_000] == expected, "the bytes that were written");
    file.sync_all().unwrap();
    assert!(fs::read(directory.path().join("file")).unwrap() == expected, "after the sync");
    drop((file, client, server));
    cache.close().unwrap();
}

/// Reads of many threads of a client at a time, which are batches in the owner.
#[test]
fn threads_of_a_client_share_its_requests() {
    let directory = directory();
    numbered_file(directory.path(), 2048);
    let (_cache, _server) = owner(directory.path(), 1 << 20);
    let (_client, file) = client(directory.path());
    thread::scope(|scope| {
        for seed in 0..100 {
            let file = &file;
            scope.spawn(move || {
                let mut random = fastrand::Rng::with_seed(seed);
                for _ in 0..100 {
                    check_numbered(file, random.u64(..2040) * PAGE, 4096 << random.u32(..3));
                }
            });
        }
    });
}

/// A child of a client has its memory, but not its threads.
#[test]
fn a_forked_child_of_a_client_is_refused() {
    const NAME: &str = "a_forked_child_of_a_client_is_refused";
    let forks = |directory: &Path| {
        let (cache, file) = client(directory);
        check_numbered(&file, 0, 4096);
        // SAFETY: the child runs a few calls of this test, and ends.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let error = file.read_at(&mut [0; 8], 0).unwrap_err();
            let is_refused = error.kind() == ErrorKind::Forked && !cache.is_connected();
            drop((file, cache));
            std::process::exit(if is_refused { 0 } else { 1 });
        }
        let mut status = -1;
        // SAFETY: memory for the answer, and a child of this process.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0, "the child was not refused");
        check_numbered(&file, PAGE, 4096);
    };
    if plays("client", forks) {
        return;
    }
    let directory = directory();
    numbered_file(directory.path(), 64);
    let _owner = owner(directory.path(), 1 << 20);
    finish(vec![start(NAME, "client", directory.path())]);
}

#[test]
fn sixty_four_clients_read_at_once() {
    let directory = directory();
    numbered_file(directory.path(), 1024);
    let (cache, server) = owner(directory.path(), 1 << 20);
    thread::scope(|scope| {
        for seed in 0..64 {
            let path = directory.path();
            scope.spawn(move || {
                let (_client, file) = client(path);
                let mut random = fastrand::Rng::with_seed(seed);
                for _ in 0..100 {
                    check_numbered(&file, random.u64(..1020) * PAGE, 4096 << random.u32(..2));
                }
            });
        }
    });
    wait_until("all are gone", || server.clients() == 0 && cache.files().is_empty());
}
