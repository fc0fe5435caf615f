//! The functions of a file, called as SQLite calls them: with SQLite's library in this process.
//!
//! # Safety
//! The types of the functions are those of `sqlite3.h`.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::ptr;

use tempfile::TempDir;

use crate::library::{Connection, Library};

const NOTFOUND: c_int = 12;
const IOERR_SHORT_READ: c_int = 10 | 2 << 8;
const FCNTL_LOCKSTATE: c_int = 1;
const FCNTL_SIZE_HINT: c_int = 5;
const FCNTL_CHUNK_SIZE: c_int = 6;
const FCNTL_FILE_POINTER: c_int = 7;
const FCNTL_VFSNAME: c_int = 12;
const FCNTL_MMAP_SIZE: c_int = 18;
const FCNTL_HAS_MOVED: c_int = 20;
/// Starts an atomic write of several pages, which the VFS does not offer.
const FCNTL_BEGIN_ATOMIC_WRITE: c_int = 31;
const FCNTL_EXTERNAL_READER: c_int = 40;

/// The first functions of a file.
#[repr(C)]
struct Methods {
    version: c_int,
    close: *const c_void,
    read: unsafe extern "C" fn(*mut File, *mut u8, c_int, i64) -> c_int,
    write: *const c_void,
    truncate: *const c_void,
    sync: *const c_void,
    file_size: unsafe extern "C" fn(*mut File, *mut i64) -> c_int,
}

#[repr(C)]
struct File {
    methods: *const Methods,
}

/// A database, and a connection to it through the VFS.
struct Database {
    connection: Connection,
    path: PathBuf,
    _directory: TempDir,
}

impl Database {
    fn open() -> Option<Self> {
        let library = Library::load()?;
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("x.db");
        let connection = library.open_cached(&path, "").unwrap();
        Some(Self { connection, path, _directory: directory })
    }

    fn run(&self, sql: &str) {
        self.connection.run(sql).unwrap();
    }

    fn control<T>(&self, operation: c_int, argument: &mut T) -> c_int {
        self.connection.control(operation, argument)
    }

    fn file(&self) -> *mut File {
        let mut file = ptr::null_mut();
        assert_eq!(self.control(FCNTL_FILE_POINTER, &mut file), 0);
        file
    }

    fn methods(&self) -> &Methods {
        // SAFETY: an open file.
        let methods = unsafe { (*self.file()).methods };
        // SAFETY: its functions.
        unsafe { &*methods }
    }

    /// Reads into a buffer of other bytes.
    fn read(&self, offset: u64, length: usize) -> (c_int, Vec<u8>) {
        let mut buffer = vec![0xa5; length];
        let (read, file) = (self.methods().read, self.file());
        // SAFETY: an open file and a buffer.
        let code = unsafe { read(file, buffer.as_mut_ptr(), length as c_int, offset as i64) };
        (code, buffer)
    }

    fn size_bytes(&self) -> u64 {
        let mut size = 0;
        let (file_size, file) = (self.methods().file_size, self.file());
        // SAFETY: an open file and a variable.
        assert_eq!(unsafe { file_size(file, &mut size) }, 0);
        size as u64
    }
}

fn disk_bytes(path: &Path) -> u64 {
    std::fs::metadata(path).unwrap().len()
}

#[test]
fn a_short_read_is_told_and_ends_with_zeros() {
    let Some(connection) = Database::open() else { return };
    // Before the first lock, and after it.
    assert_eq!(connection.read(0, 100), (IOERR_SHORT_READ, vec![0; 100]));
    connection.run("create table t(a); insert into t values(7)");
    let size = connection.size_bytes();
    let (code, bytes) = connection.read(0, 100);
    assert_eq!((code, &bytes[..15]), (0, b"SQLite format 3".as_slice()));
    let (code, bytes) = connection.read(size - 50, 5000);
    assert_eq!(code, IOERR_SHORT_READ);
    assert!(bytes[50..].iter().all(|byte| *byte == 0));
    assert_eq!(connection.read(size, 4096), (IOERR_SHORT_READ, vec![0; 4096]));
    assert_eq!(connection.read(size + 10_000, 9), (IOERR_SHORT_READ, vec![0; 9]));
}

#[test]
fn size_hints_grow_the_file_in_whole_chunks() {
    let Some(connection) = Database::open() else { return };
    connection.run("create table t(a)");
    let size = connection.size_bytes();
    assert_eq!(connection.control(FCNTL_SIZE_HINT, &mut 5_000_000_i64), 0);
    assert_eq!(connection.size_bytes(), size, "without chunks nothing grows");
    assert_eq!(connection.control(FCNTL_CHUNK_SIZE, &mut (1 << 20)), 0);
    assert_eq!(connection.control(FCNTL_SIZE_HINT, &mut 2_500_000_i64), 0);
    assert_eq!(connection.size_bytes(), 3 << 20);
    assert_eq!(connection.control(FCNTL_SIZE_HINT, &mut 1_i64), 0);
    assert_eq!(connection.size_bytes(), 3 << 20, "a hint never cuts");
    connection.run(
        "with recursive n(i) as (select 1 union all select i+1 from n where i<5000)
             insert into t select randomblob(1000) from n",
    );
    assert_eq!(connection.size_bytes() % (1 << 20), 0);
    assert_eq!(disk_bytes(&connection.path), connection.size_bytes());
    connection.run("delete from t; vacuum");
    assert_eq!(connection.size_bytes(), 1 << 20);
    connection.run("pragma integrity_check; pragma bifolio_stats");
}

#[test]
fn file_controls_answer_for_the_cache() {
    let Some(connection) = Database::open() else { return };
    connection.run("create table t(a)");
    let mut name: *mut c_char = ptr::null_mut();
    assert_eq!(connection.control(FCNTL_VFSNAME, &mut name), 0);
    // SAFETY: a text of SQLite; the test does not free it.
    assert_eq!(unsafe { CStr::from_ptr(name) }, c"bifolio");
    let mut level: c_int = -1;
    assert_eq!(connection.control(FCNTL_LOCKSTATE, &mut level), 0);
    assert_eq!(level, 0, "SQLite holds no lock, though the VFS does");
    connection.run("begin immediate");
    assert_eq!(connection.control(FCNTL_LOCKSTATE, &mut level), 0);
    assert_eq!(level, 2);
    connection.run("rollback");
    let mut has_moved: c_int = -1;
    assert_eq!(connection.control(FCNTL_HAS_MOVED, &mut has_moved), 0);
    assert_eq!(has_moved, 0);
    std::fs::rename(&connection.path, connection.path.with_extension("moved")).unwrap();
    assert_eq!(connection.control(FCNTL_HAS_MOVED, &mut has_moved), 0);
    assert_eq!(has_moved, 1);
    assert_eq!(connection.control(FCNTL_BEGIN_ATOMIC_WRITE, &mut 0), NOTFOUND);
    assert_eq!(connection.methods().version, 2, "no mapped pages");
}

#[test]
fn no_limit_of_mapped_bytes_can_be_set() {
    let Some(connection) = Database::open() else { return };
    connection.run("create table t(a)");
    for asked in [-1, 0, 1 << 20] {
        let mut limit: i64 = asked;
        assert_eq!(connection.control(FCNTL_MMAP_SIZE, &mut limit), 0);
        assert_eq!(limit, 0);
    }
    assert_eq!(connection.connection.ask("pragma mmap_size=1000000"), "0");
    assert_eq!(connection.connection.ask("pragma mmap_size"), "0");
}

#[test]
fn a_log_has_no_reader_in_another_process() {
    let Some(connection) = Database::open() else { return };
    for sql in ["select 1", "pragma journal_mode=wal", "begin; select * from sqlite_schema"] {
        connection.run(sql);
        let mut has_reader: c_int = -1;
        assert_eq!(connection.control(FCNTL_EXTERNAL_READER, &mut has_reader), 0, "{sql}");
        assert_eq!(has_reader, 0, "{sql}");
    }
}

/// Readers of this process are none, through whatever connection. Another copy of SQLite counts.
#[test]
fn readers_of_other_processes_are_told_from_own_ones() {
    let (Some(database), Some(library)) = (Database::open(), Library::load()) else { return };
    let Some(copy) = Library::load_copy() else { return };
    database.run("pragma journal_mode=wal; create table t(a); insert into t values(7)");
    let has_reader = || {
        let mut has_reader: c_int = -1;
        assert_eq!(database.control(FCNTL_EXTERNAL_READER, &mut has_reader), 0);
        has_reader
    };
    let also = library.open_cached(&database.path, "").unwrap();
    also.run("begin; select * from t").unwrap();
    assert_eq!(has_reader(), 0);
    let other = copy.open_plainly(&database.path);
    other.run("begin; select * from t").unwrap();
    assert_eq!(has_reader(), 1);
    other.run("commit").unwrap();
    assert_eq!(has_reader(), 0);
}
