//! The functions of a file, called as SQLite calls them: with SQLite's library in this process.
//!
//! # Safety
//! The types of the functions are those of `sqlite3.h`.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::Once;

use bifolio_testing::skip;
use tempfile::TempDir;

const NOTFOUND: c_int = 12;
const IOERR_SHORT_READ: c_int = 10 | 2 << 8;
const FCNTL_LOCKSTATE: c_int = 1;
const FCNTL_SIZE_HINT: c_int = 5;
const FCNTL_CHUNK_SIZE: c_int = 6;
const FCNTL_FILE_POINTER: c_int = 7;
const FCNTL_VFSNAME: c_int = 12;
const FCNTL_HAS_MOVED: c_int = 20;
/// Starts an atomic write of several pages, which the VFS does not offer.
const FCNTL_BEGIN_ATOMIC_WRITE: c_int = 31;
const OPEN_READWRITE_CREATE_URI: c_int = 2 | 4 | 0x40;

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

/// SQLite's library, loaded when the test runs.
#[derive(Clone, Copy)]
struct Library(*mut c_void);

impl Library {
    /// Loads the library and registers the VFS in it; `None` if the machine has none.
    fn load() -> Option<Self> {
        static REGISTERED: Once = Once::new();
        // SAFETY: SQLite may be loaded.
        let library = Self(unsafe { libc::dlopen(c"libsqlite3.so.0".as_ptr(), libc::RTLD_NOW) });
        if library.0.is_null() {
            skip("sqlite3", "the library libsqlite3.so.0 is not installed");
            return None;
        }
        REGISTERED.call_once(|| {
            type Register = unsafe extern "C" fn(Entry) -> c_int;
            // SAFETY: the function's type.
            let register: Register = unsafe { library.function(c"sqlite3_auto_extension") };
            // SAFETY: an entry point.
            assert_eq!(unsafe { register(entry) }, 0);
        });
        Some(library)
    }

    /// # Safety
    /// `F` is the function's type.
    unsafe fn function<F: Copy>(self, name: &CStr) -> F {
        // SAFETY: a loaded library.
        let address = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        assert!(!address.is_null(), "{name:?}");
        // SAFETY: the contract.
        unsafe { ptr::from_ref(&address).cast::<F>().read() }
    }
}

type Entry = unsafe extern "C" fn(*mut c_void, *mut *mut c_char, *const *const c_void) -> c_int;

unsafe extern "C" fn entry(
    connection: *mut c_void,
    message: *mut *mut c_char,
    table: *const *const c_void,
) -> c_int {
    // SAFETY: SQLite's arguments.
    let code = unsafe { bifolio_sqlite::sqlite3_bifoliosqlite_init(connection, message, table) };
    // To stay loaded is an answer for SQLite's loader only.
    if code == 256 { 0 } else { code }
}

/// A connection through the VFS.
struct Connection {
    library: Library,
    pointer: *mut c_void,
    path: PathBuf,
    _directory: TempDir,
}

impl Connection {
    fn open() -> Option<Self> {
        type Open =
            unsafe extern "C" fn(*const c_char, *mut *mut c_void, c_int, *const c_char) -> c_int;
        let library = Library::load()?;
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("x.db");
        // The extension is registered by the first connection.
        for name in [":memory:".to_owned(), format!("file:{}?vfs=bifolio", path.display())] {
            let name = CString::new(name).unwrap();
            let mut pointer = ptr::null_mut();
            // SAFETY: the function's type.
            let open: Open = unsafe { library.function(c"sqlite3_open_v2") };
            // SAFETY: texts and a variable.
            let code = unsafe {
                open(name.as_ptr(), &mut pointer, OPEN_READWRITE_CREATE_URI, ptr::null())
            };
            assert_eq!(code, 0);
            if name.as_bytes() == b":memory:" {
                close(library, pointer);
                continue;
            }
            return Some(Self { library, pointer, path, _directory: directory });
        }
        unreachable!()
    }

    fn run(&self, sql: &str) {
        type Run = unsafe extern "C" fn(
            *mut c_void,
            *const c_char,
            *const c_void,
            *const c_void,
            *const c_void,
        ) -> c_int;
        let text = CString::new(sql).unwrap();
        // SAFETY: the function's type.
        let run: Run = unsafe { self.library.function(c"sqlite3_exec") };
        // SAFETY: an open connection and a text.
        let code =
            unsafe { run(self.pointer, text.as_ptr(), ptr::null(), ptr::null(), ptr::null()) };
        assert_eq!(code, 0, "{sql}");
    }

    fn control<T>(&self, operation: c_int, argument: &mut T) -> c_int {
        type Control =
            unsafe extern "C" fn(*mut c_void, *const c_char, c_int, *mut c_void) -> c_int;
        // SAFETY: the function's type.
        let control: Control = unsafe { self.library.function(c"sqlite3_file_control") };
        let argument = ptr::from_mut(argument).cast();
        // SAFETY: an open connection, and an argument as the operation has it.
        unsafe { control(self.pointer, c"main".as_ptr(), operation, argument) }
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

impl Drop for Connection {
    fn drop(&mut self) {
        close(self.library, self.pointer);
    }
}

fn close(library: Library, connection: *mut c_void) {
    // SAFETY: the function's type.
    let close: unsafe extern "C" fn(*mut c_void) -> c_int =
        unsafe { library.function(c"sqlite3_close") };
    // SAFETY: an open connection.
    assert_eq!(unsafe { close(connection) }, 0);
}

fn disk_bytes(path: &Path) -> u64 {
    std::fs::metadata(path).unwrap().len()
}

#[test]
fn a_short_read_is_told_and_ends_with_zeros() {
    let Some(connection) = Connection::open() else { return };
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
    let Some(connection) = Connection::open() else { return };
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
    let Some(connection) = Connection::open() else { return };
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
