//! A B-tree with a write-ahead log: write gate, reads in place, pins, group commit, checkpoints,
//! and a crash test.
//!
//! Keys and values are 64-bit numbers. A change is one log record with the bytes that it changes in
//! each page. Replaying all records in order repairs every page, even a torn one, because whatever
//! differs from the last durable state of a page is in the log.
//!
//! ```text
//!   put:         pin the pages -> append the record -> change the pages, with its LSN -> unpin
//!   commit:      make the log durable up to the LSN; concurrent commits share a flush
//!   gate:        the cache writes no page before the log is durable up to the page's LSN
//!   checkpoint:  start a log segment -> sync what was dirty -> delete the older segments
//!   open:        replay the segments -> sync the tree -> delete them
//! ```
//!
//! Length: an example is one program, read from top to bottom.
//!
//! Run without arguments, 8 threads commit, then a child process is killed and its files checked.

use bifolio::{Cache, File, GatedFile, OpenOptions, PageView, WriteGate};
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::ops::ControlFlow::{self, Break, Continue};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, RwLock};
use std::thread;
use std::time::Duration;

const PAGE_BYTES: usize = 4096;
const LOCK: &str = "no panic under the lock";
/// Pages by which the tree's file grows.
const GROWTH_PAGES: u64 = 64;
/// Changed bytes of a page that are at most this far apart are logged as one range.
const RANGE_GAP_BYTES: usize = 16;
/// Length and checksum of a record.
const HEAD_BYTES: usize = 16;

fn broken(problem: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, problem.into())
}

/// FNV-1a, enough to recognize the torn end of a log.
fn checksum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |sum, byte| {
        (sum ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

fn number(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"))
}

/// Part of the log, in a file of its own. An LSN is a position in the whole log.
#[derive(Debug)]
struct Segment {
    start_lsn: u64,
    file: File,
}

/// Write-ahead log. It lives in the same cache as the tree.
#[derive(Debug)]
struct Log {
    cache: Cache,
    directory: PathBuf,
    current: RwLock<Arc<Segment>>,
    durable_lsn: AtomicU64,
    /// Set when an append has failed: the log may end in a part of a record.
    is_broken: AtomicBool,
}

impl Log {
    fn create(cache: &Cache, directory: &Path, start_lsn: u64) -> io::Result<Self> {
        Ok(Self {
            cache: cache.clone(),
            directory: directory.to_owned(),
            current: RwLock::new(Arc::new(Self::create_segment(cache, directory, start_lsn)?)),
            durable_lsn: AtomicU64::new(start_lsn),
            is_broken: AtomicBool::new(false),
        })
    }

    fn create_segment(cache: &Cache, directory: &Path, start_lsn: u64) -> io::Result<Segment> {
        let path = directory.join(format!("log.{start_lsn:020}"));
        let options = OpenOptions::new().read(true).write(true).create(true).truncate(true);
        let file = cache.open(path, &options)?;
        cache.sync_directory(directory)?;
        Ok(Segment { start_lsn, file })
    }

    /// Returns the segments in a directory, oldest first.
    fn segments(directory: &Path) -> io::Result<Vec<(u64, PathBuf)>> {
        let mut found = Vec::new();
        for entry in fs::read_dir(directory)? {
            let path = entry?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            found.extend(
                name.strip_prefix("log.").and_then(|start| Some((start.parse().ok()?, path))),
            );
        }
        found.sort();
        Ok(found)
    }

    /// Returns the current segment, without the lock: `make_durable` takes it, and writes to the
    /// tree may wait for that.
    fn current(&self) -> Arc<Segment> {
        Arc::clone(&self.current.read().expect(LOCK))
    }

    /// Appends a record and returns its LSN, which is where it ends. Callers serialize.
    fn append(&self, body: &[u8]) -> io::Result<u64> {
        if self.is_broken.load(Ordering::Relaxed) {
            return Err(broken("an append has failed: open the tree again"));
        }
        let segment = self.current();
        let head = [body.len() as u64, checksum(body)].map(u64::to_le_bytes).concat();
        let record = [&head, body].concat();
        match segment.file.append(&record) {
            Ok(position) => Ok(segment.start_lsn + position + record.len() as u64),
            Err(error) => {
                self.is_broken.store(true, Ordering::Relaxed);
                Err(error.into())
            }
        }
    }

    /// Calls `replay` for each whole record of a segment. Returns the LSN where they end.
    fn read(
        start_lsn: u64,
        path: &Path,
        mut replay: impl FnMut(&[u8]) -> io::Result<()>,
    ) -> io::Result<u64> {
        let bytes = fs::read(path)?;
        let mut at = 0;
        while at + HEAD_BYTES <= bytes.len() {
            let length = usize::try_from(number(&bytes, at)).unwrap_or(usize::MAX);
            let body = at + HEAD_BYTES..(at + HEAD_BYTES).saturating_add(length);
            let Some(record) = bytes.get(body.clone()) else { break };
            if checksum(record) != number(&bytes, at + 8) {
                break;
            }
            replay(record)?;
            at = body.end;
        }
        Ok(start_lsn + at as u64)
    }

    /// Starts a new segment, with the current one durable. Returns its first LSN. Callers serialize
    /// with `append`.
    fn rotate(&self) -> io::Result<u64> {
        let old = self.current();
        let start_lsn = old.start_lsn + old.file.len();
        old.file.sync_data()?;
        let new = Arc::new(Self::create_segment(&self.cache, &self.directory, start_lsn)?);
        *self.current.write().expect(LOCK) = new;
        self.durable_lsn.fetch_max(start_lsn, Ordering::Release);
        Ok(start_lsn)
    }

    /// Deletes the segments that end at or before `lsn`.
    fn delete_before(&self, lsn: u64) -> io::Result<()> {
        for (start, path) in Self::segments(&self.directory)? {
            if start < lsn {
                fs::remove_file(path)?;
            }
        }
        Ok(self.cache.sync_directory(&self.directory)?)
    }
}

impl WriteGate for Log {
    fn durable_lsn(&self) -> u64 {
        self.durable_lsn.load(Ordering::Acquire)
    }

    /// Also what a commit calls: threads that sync at the same time share one flush.
    fn make_durable(&self, lsn: u64) -> io::Result<()> {
        if self.durable_lsn() >= lsn {
            return Ok(());
        }
        let segment = self.current();
        let end_lsn = segment.start_lsn + segment.file.len();
        segment.file.sync_data()?;
        self.durable_lsn.fetch_max(end_lsn, Ordering::Release);
        Ok(())
    }
}

/// Page of the tree: a head (kind, number of entries), then entries of a key and a value or child.
/// No key below a child is less than the child's key in the inner node.
#[derive(Clone, PartialEq, Eq)]
struct Node(Box<[u8; PAGE_BYTES]>);

const ENTRY_BYTES: usize = 16;
const ENTRIES_MAX: usize = (PAGE_BYTES - HEAD_BYTES) / ENTRY_BYTES;

impl Node {
    fn new(is_leaf: bool, entries: &[(u64, u64)]) -> Self {
        let mut node = Self(Box::new([0; PAGE_BYTES]));
        let head = [if is_leaf { 1 } else { 2 }, entries.len() as u64];
        let numbers =
            head.into_iter().chain(entries.iter().flat_map(|(key, value)| [*key, *value]));
        for (at, number) in node.0.chunks_exact_mut(8).zip(numbers) {
            at.copy_from_slice(&number.to_le_bytes());
        }
        node
    }

    fn is_leaf(&self) -> bool {
        self.0[0] == 1
    }

    fn len(&self) -> usize {
        (number(&self.0[..], 8) as usize).min(ENTRIES_MAX)
    }

    fn entry(&self, index: usize) -> (u64, u64) {
        let at = HEAD_BYTES + index * ENTRY_BYTES;
        (number(&self.0[..], at), number(&self.0[..], at + 8))
    }

    fn entries(&self) -> Vec<(u64, u64)> {
        (0..self.len()).map(|index| self.entry(index)).collect()
    }

    /// Returns the index of the child for a key.
    fn child(&self, key: u64) -> usize {
        self.entries().partition_point(|entry| entry.0 <= key).saturating_sub(1)
    }
}

/// Searches a node in place, without a copy or a reference: continues with a child, or ends with
/// the value in a leaf. The bytes may change meanwhile; then `read_with` calls this again.
fn step(node: &PageView<'_>, key: u64) -> Option<ControlFlow<Option<u64>, u64>> {
    let number = |index: usize, at| {
        node.array(HEAD_BYTES + index * ENTRY_BYTES + at).map(u64::from_le_bytes)
    };
    let (mut low, mut high) =
        (0, (node.array(8).map(u64::from_le_bytes)? as usize).min(ENTRIES_MAX));
    while low < high {
        let middle = low.midpoint(high);
        if number(middle, 0)? <= key { low = middle + 1 } else { high = middle }
    }
    let index = low.saturating_sub(1);
    if node.array(0)? != [1] {
        return number(index, 8).map(Continue);
    }
    let is_there = low > 0 && number(index, 0)? == key;
    Some(Break(if is_there { number(index, 8) } else { None }))
}

/// Content of page 0.
#[derive(Clone, Copy, Debug, Default)]
struct Meta {
    root: u64,
    next_page: u64,
}

/// The tree. One thread changes it at a time; commits are not serialized.
struct Tree {
    cache: Cache,
    pages: GatedFile,
    log: Arc<Log>,
    meta: RwLock<Meta>,
    checkpointing: Mutex<()>,
}

/// Pages that a change makes, by their number.
type Edit = BTreeMap<u64, Node>;

impl Tree {
    /// Opens the tree in a directory, or creates it. Replays the log.
    fn open(cache: &Cache, directory: &Path) -> io::Result<Self> {
        let options = OpenOptions::new().read(true).write(true).create(true);
        let pages = cache.open(directory.join("pages"), &options)?;
        let mut end_lsn = 0;
        let segments = Log::segments(directory)?;
        for (start_lsn, path) in &segments {
            if end_lsn > *start_lsn {
                return Err(broken("segments of the log overlap"));
            }
            end_lsn = Log::read(*start_lsn, path, |record| replay(&pages, record))?;
        }
        pages.sync_data()?;
        // The log begins anew, behind all LSNs of before.
        let log = Arc::new(Log::create(cache, directory, end_lsn + 1)?);
        log.delete_before(end_lsn + 1)?;
        let pages = GatedFile::new(pages, Arc::<Log>::clone(&log))?;
        let (cache, checkpointing) = (cache.clone(), Mutex::default());
        let tree = Self { cache, pages, log, meta: RwLock::default(), checkpointing };
        let mut meta = Meta::default();
        if tree.pages.len() > 0 {
            (meta.root, meta.next_page) = tree.node(0)?.entry(0);
        }
        if meta.root == 0 {
            let first = Meta { root: 1, next_page: 2 };
            let lsn = tree.apply(&[(1, Node::new(true, &[]))].into(), &mut meta, first)?;
            tree.log.make_durable(lsn)?;
        }
        *tree.meta.write().expect(LOCK) = meta;
        Ok(tree)
    }

    fn node(&self, page: u64) -> io::Result<Node> {
        let mut node = Node(Box::new([0; PAGE_BYTES]));
        self.pages.read_exact_at(&mut node.0[..], page * PAGE_BYTES as u64)?;
        Ok(node)
    }

    /// Returns a page as `edit` has changed it so far.
    fn edited(&self, edit: &Edit, page: u64) -> io::Result<Node> {
        edit.get(&page).map_or_else(|| self.node(page), |node| Ok(node.clone()))
    }

    /// Returns the value of a key.
    fn get(&self, key: u64) -> io::Result<Option<u64>> {
        let meta = self.meta.read().expect(LOCK);
        let mut page = meta.root;
        loop {
            let start = page * PAGE_BYTES as u64;
            let step =
                self.pages.read_with(start..start + PAGE_BYTES as u64, |node| step(node, key))?;
            match step.ok_or_else(|| broken(format!("page {page} is no node")))? {
                Continue(child) => page = child,
                Break(value) => return Ok(value),
            }
        }
    }

    /// Sets the values of keys, all or none. Durable when this returns.
    fn put(&self, entries: &[(u64, u64)]) -> io::Result<()> {
        let lsn = {
            let mut meta = self.meta.write().expect(LOCK);
            let (mut edit, mut new_meta) = (Edit::default(), *meta);
            for (key, value) in entries {
                self.insert(&mut edit, &mut new_meta, *key, *value)?;
            }
            self.apply(&edit, &mut meta, new_meta)?
        };
        // Group commit: without the lock, so that others append their records meanwhile.
        self.log.make_durable(lsn)
    }

    fn insert(&self, edit: &mut Edit, meta: &mut Meta, key: u64, value: u64) -> io::Result<()> {
        let mut path = Vec::new();
        let mut page = meta.root;
        let mut node = self.edited(edit, page)?;
        while !node.is_leaf() {
            let index = node.child(key);
            path.push((page, node.clone(), index));
            page = node.entry(index).1;
            node = self.edited(edit, page)?;
        }
        let mut entries = node.entries();
        let index = entries.partition_point(|entry| entry.0 < key);
        match entries.get_mut(index).filter(|entry| entry.0 == key) {
            Some(entry) => entry.1 = value,
            None => entries.insert(index, (key, value)),
        }
        // Up the tree, as long as nodes split.
        while let Some((key, right)) = store(edit, page, &node, entries, meta) {
            let Some((parent_page, parent, index)) = path.pop() else {
                let root = Node::new(false, &[(0, page), (key, right)]);
                meta.root = meta.next_page;
                meta.next_page += 1;
                edit.insert(meta.root, root);
                break;
            };
            (page, node) = (parent_page, parent);
            entries = node.entries();
            entries.insert(index + 1, (key, right));
        }
        Ok(())
    }

    /// Logs an edit and applies it. On an error, nothing has changed.
    fn apply(&self, edit: &Edit, meta: &mut Meta, new_meta: Meta) -> io::Result<u64> {
        let mut pages = edit.clone();
        pages.insert(0, Node::new(true, &[(new_meta.root, new_meta.next_page)]));
        let last_page = pages.keys().last().copied().unwrap_or(0);
        if (last_page + 1) * PAGE_BYTES as u64 > self.pages.len() {
            // Zeros behind the last page that page 0 knows of: they need no log record.
            let len_bytes = (last_page + GROWTH_PAGES) * PAGE_BYTES as u64;
            self.pages.unlogged().set_len(len_bytes)?;
        }
        // All pins first: nothing can fail once the record is in the log. A page is not written out
        // while it is pinned for changes, so its LSN can follow.
        let mut record = Vec::new();
        let mut pins = Vec::new();
        for (page, node) in &pages {
            let ranges = differences(&self.node(*page)?, node);
            let start = page * PAGE_BYTES as u64;
            for range in &ranges {
                record.extend((start + range.start as u64).to_le_bytes());
                record.extend((range.len() as u64).to_le_bytes());
                record.extend(&node.0[range.clone()]);
            }
            if !ranges.is_empty() {
                pins.push((self.pages.pin_mut(start..start + PAGE_BYTES as u64)?, node));
            }
        }
        let lsn = self.log.append(&record)?;
        for (mut pin, node) in pins {
            pin.copy_from(0, &node.0[..]).unwrap();
            pin.assign_lsn(lsn);
        }
        *meta = new_meta;
        Ok(lsn)
    }

    /// Makes the tree durable up to now, and deletes the log before. Readers and writers go on.
    fn checkpoint(&self) -> io::Result<()> {
        let _one_at_a_time = self.checkpointing.lock().expect(LOCK);
        let (checkpoint, lsn) = {
            let _alone = self.meta.write().expect(LOCK);
            let lsn = self.log.rotate()?;
            (self.pages.checkpoint()?, lsn)
        };
        checkpoint.sync()?;
        assert!(self.pages.oldest_dirty_lsn().is_none_or(|oldest| oldest > lsn));
        self.log.delete_before(lsn)
    }

    /// Checks the order of all keys, and returns how many there are.
    fn check(&self) -> io::Result<u64> {
        let meta = self.meta.read().expect(LOCK);
        let (mut count, mut last) = (0, None);
        let mut stack = vec![meta.root];
        while let Some(page) = stack.pop() {
            let node = self.node(page)?;
            if !node.is_leaf() {
                stack.extend(node.entries().iter().rev().map(|entry| entry.1));
                continue;
            }
            for (key, _) in node.entries() {
                if last.is_some_and(|last| last >= key) {
                    return Err(broken(format!("key {key} of page {page} is out of order")));
                }
                (count, last) = (count + 1, Some(key));
            }
        }
        Ok(count)
    }
}

/// Stores the entries in a page. If they do not fit, the upper half goes to a new page, whose
/// first key and number are returned.
fn store(
    edit: &mut Edit,
    page: u64,
    node: &Node,
    mut entries: Vec<(u64, u64)>,
    meta: &mut Meta,
) -> Option<(u64, u64)> {
    let mut split = None;
    if entries.len() > ENTRIES_MAX {
        // A key at the end: keys may come in order, and full pages are better then.
        let is_last = entries.len() - 1;
        let middle =
            if entries[is_last] > node.entry(node.len() - 1) { is_last } else { is_last / 2 };
        let upper = entries.split_off(middle);
        let right = meta.next_page;
        meta.next_page += 1;
        edit.insert(right, Node::new(node.is_leaf(), &upper));
        split = Some((upper[0].0, right));
    }
    edit.insert(page, Node::new(node.is_leaf(), &entries));
    split
}

/// Returns the ranges in which two pages differ, with small gaps closed.
fn differences(old: &Node, new: &Node) -> Vec<std::ops::Range<usize>> {
    let mut ranges: Vec<std::ops::Range<usize>> = Vec::new();
    for at in (0..PAGE_BYTES).filter(|at| old.0[*at] != new.0[*at]) {
        match ranges.last_mut() {
            Some(last) if at <= last.end + RANGE_GAP_BYTES => last.end = at + 1,
            _ => ranges.push(at..at + 1),
        }
    }
    ranges
}

/// Applies a record of the log. No LSN is needed: it is durable.
fn replay(pages: &File, record: &[u8]) -> io::Result<()> {
    let mut at = 0;
    while at < record.len() {
        let (position, length) = (number(record, at), number(record, at + 8) as usize);
        pages.write_all_at(&record[at + 16..at + 16 + length], position)?;
        at += 16 + length;
    }
    Ok(())
}

fn small_cache() -> bifolio::Result<Cache> {
    // Smaller than the tree, and pages become old quickly, so that the gate has something to do.
    Cache::builder().memory(512 << 10).dirty_age_max(Duration::from_millis(20)).build()
}

fn value_of(key: u64) -> u64 {
    key.wrapping_mul(0x9E37_79B9_7F4A_7C15)
}

/// Commits from 8 threads; returns the flushes of the device for each commit.
pub fn group_commit(directory: &Path, commits_per_thread: u64) -> io::Result<f64> {
    const THREADS: u64 = 8;
    let tree = Tree::open(&small_cache()?, directory)?;
    for start in (0..40_000).step_by(500) {
        let batch: Vec<_> = (start..start + 500).map(|key| (2 * key, value_of(2 * key))).collect();
        tree.put(&batch)?;
    }
    tree.checkpoint()?;
    let before = tree.cache.stats();
    thread::scope(|scope| {
        let commit = |thread: u64| {
            let mut key = thread;
            for _ in 0..commits_per_thread {
                key = key.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(2 * thread + 1);
                let odd = (key % 80_000) | 1;
                tree.put(&[(odd, value_of(odd))])?;
            }
            io::Result::Ok(())
        };
        let threads: Vec<_> =
            (0..THREADS).map(|thread| scope.spawn(move || commit(thread))).collect();
        threads.into_iter().try_for_each(|thread| thread.join().expect("no panic"))
    })?;
    let after = tree.cache.stats();
    tree.checkpoint()?;
    let keys = tree.check()?;
    let (commits, flushes) =
        (THREADS * commits_per_thread, after.storage.flushes - before.storage.flushes);
    let per_commit = flushes as f64 / commits as f64;
    println!(
        "{keys} keys; {commits} commits of {THREADS} threads: {per_commit:.2} flushes a commit"
    );
    println!("the gate was asked {} times", after.writes.gate_asks);
    Ok(per_commit)
}

/// Commits until the process is killed, and notes each commit in a file once it is durable.
pub fn commit_until_killed(directory: &Path) -> io::Result<()> {
    use std::io::Write;
    let tree = Tree::open(&small_cache()?, directory)?;
    let acknowledged = fs::File::options().append(true).open(directory.join("acknowledged"))?;
    let first = acknowledged.metadata()?.len() / 8 + 1_000_000;
    let next = AtomicU64::new(first);
    thread::scope(|scope| {
        let commit = || {
            loop {
                let number = next.fetch_add(1, Ordering::Relaxed);
                let key = ((number.reverse_bits() >> 40) << 24) | number;
                tree.put(&[(key, value_of(key))])?;
                // `write` survives the process, unlike what is in its caches.
                (&acknowledged).write_all(&key.to_le_bytes())?;
                if number.is_multiple_of(256) {
                    tree.checkpoint()?;
                }
            }
        };
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(commit)).collect();
        threads.into_iter().try_for_each(|thread| thread.join().expect("no panic"))
    })
}

/// Kills a process that runs [`commit_until_killed`], and checks that nothing it acknowledged is
/// lost. `child` returns the command.
pub fn crash_test(directory: &Path, kills: u64, child: impl Fn() -> Command) -> io::Result<()> {
    let acknowledged = directory.join("acknowledged");
    fs::write(&acknowledged, [])?;
    for kill in 1..=kills {
        let mut process = child().spawn()?;
        while fs::metadata(&acknowledged)?.len() < kill * 8 * 300 {
            if let Some(status) = process.try_wait()? {
                return Err(broken(format!("the child ended: {status}")));
            }
            thread::yield_now();
        }
        process.kill()?;
        process.wait()?;
        let (commits, keys) = check_acknowledged(directory)?;
        println!("kill {kill}: {commits} acknowledged commits, {keys} keys: none is lost");
    }
    Ok(())
}

/// Repairs the tree and checks that it has every commit that was acknowledged. Returns their number
/// and that of the keys.
pub fn check_acknowledged(directory: &Path) -> io::Result<(u64, u64)> {
    let tree = Tree::open(&small_cache()?, directory)?;
    let keys = fs::read(directory.join("acknowledged"))?;
    for key in keys.chunks_exact(8).map(|key| number(key, 0)) {
        if tree.get(key)? != Some(value_of(key)) {
            return Err(broken(format!("key {key} was committed and is lost")));
        }
    }
    Ok((keys.len() as u64 / 8, tree.check()?))
}

#[allow(dead_code)]
fn main() -> io::Result<()> {
    let arguments: Vec<_> = std::env::args_os().skip(1).collect();
    if let [mode, directory] = &arguments[..]
        && mode == "child"
    {
        return commit_until_killed(Path::new(directory));
    }
    let directory = std::env::temp_dir().join(format!("wal_btree.{}", std::process::id()));
    let done = [directory.join("commits"), directory.join("crashes")];
    done.iter().try_for_each(fs::create_dir_all)?;
    let [commits, crashes] = &done;
    group_commit(commits, 500)?;
    let program = std::env::current_exe()?;
    crash_test(crashes, 3, || {
        let mut command = Command::new(&program);
        command.arg("child").arg(crashes);
        command
    })?;
    fs::remove_dir_all(directory)
}
