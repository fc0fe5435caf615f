//! Pages of a closed database: the next open finds them again, unless something has changed the
//! file. The program `sqlite3` has the database, so that what other tests start has no descriptors
//! of it.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::thread;
use std::time::Duration;

use bifolio_testing::skip;

use crate::shell::{
    MODES, Shell, extension, has_sqlite, modes_and_kinds, through_the_system, with_cache,
    with_system,
};

/// Longer than a tick of the kernel's clock: an open soon after a change keeps nothing.
const TICK: Duration = Duration::from_millis(25);
/// Reads all pages.
const SUM: &str = "select sum(a)||' '||count(*)||' '||sum(length(hex(b))/2) from t;";
/// Rows of a page each.
const ROWS: &str = "with recursive n(i) as (select 1 union all select i+1 from n where i<100)
                        insert into t select i, 0, randomblob(3000) from n;";

/// A process that opens a database again and again.
struct Process<'a> {
    shell: Shell,
    path: &'a Path,
}

impl<'a> Process<'a> {
    fn start(path: &'a Path, kind: &str, kept_files: &str) -> Self {
        let mut command = with_system(Path::new(":memory:"));
        // An error ends the program, whose answer would be waited for.
        command.arg("-bail");
        let load = format!(".load {} sqlite3_bifoliodefault_init", extension().display());
        command.arg("-cmd").arg(load).env("BIFOLIO_KEPT_FILES", kept_files);
        command.env("BIFOLIO_EXCLUSIVE", kind.rsplit('=').next().unwrap());
        Self { shell: Shell::start(command), path }
    }

    fn ask(&mut self, sql: &str) -> String {
        self.shell.ask(sql)
    }

    fn open(&mut self) {
        writeln!(self.shell.input, ".open '{}'", self.path.display()).unwrap();
        // Without a lock.
        assert_eq!(self.ask("select 5;"), "5");
    }

    fn close(&mut self) {
        writeln!(self.shell.input, ".open :memory:").unwrap();
        assert_eq!(self.ask("select 5;"), "5");
    }

    /// Returns `true` if nine tenths of the open database are in the cache.
    fn has_pages(&mut self) -> bool {
        let sql = format!("pragma bifolio_stats('{}');", self.path.display());
        let mut lines = vec![self.ask(&sql)];
        lines.extend((0..2).map(|_| self.shell.lines.next().unwrap().unwrap()));
        let bytes = |name| {
            let found = lines.iter().find_map(|line| line.strip_prefix(name));
            found.unwrap().parse::<u64>().unwrap()
        };
        bytes("resident_bytes ") >= bytes("len_bytes ") / 10 * 9
    }

    /// Returns `true` if the pages of the open database, which was closed before, are used.
    fn has_kept(&mut self) -> bool {
        self.ask("select count(*) from sqlite_schema;");
        self.has_pages()
    }

    /// Opens, reads and closes the database until it has kept all pages.
    fn keep(&mut self, what: &str) {
        for _ in 0..5 {
            self.open();
            let has_kept = self.has_kept();
            self.ask(SUM);
            self.close();
            if has_kept {
                return;
            }
            thread::sleep(TICK);
        }
        panic!("{what}: not kept");
    }
}

/// Returns `true` if pages of files in `directory` can be kept; otherwise the test is skipped.
fn can_keep(directory: &Path) -> bool {
    // As the library's tests have them.
    let known = ["ext2/ext3", "xfs", "btrfs", "f2fs"];
    let mut command = std::process::Command::new("stat");
    let output = command.args(["-f", "-c", "%T"]).arg(directory).output().unwrap();
    let found = String::from_utf8(output.stdout).unwrap();
    let is_known = known.contains(&found.trim());
    if !is_known {
        skip("local-files", format!("the file system is {found}"));
    }
    is_known
}

fn make(path: &Path, mode: &str) {
    let sql = format!("pragma journal_mode={mode}; create table t(id integer primary key, a, b);");
    assert_eq!(through_the_system(path, &format!("{sql} {ROWS}")).1, "");
}

#[test]
fn an_open_finds_the_pages_of_a_closed_database() {
    let directory = tempfile::tempdir().unwrap();
    if !has_sqlite() || !can_keep(directory.path()) {
        return;
    }
    for (mode, kind) in modes_and_kinds() {
        let path = directory.path().join(format!("{mode}-{kind}.db"));
        make(&path, mode);
        let mut ours = Process::start(&path, kind, "3");
        ours.keep(mode);
        for _ in 0..5 {
            ours.open();
            assert!(ours.has_pages(), "{mode}");
            assert!(ours.has_kept(), "{mode}");
            assert_eq!(ours.ask(SUM), "0 100 300000", "{mode}");
            ours.close();
            // One that only looks takes no page.
            assert_eq!(through_the_system(&path, SUM).0.trim(), "0 100 300000");
        }
        // Own changes cost the pages once.
        ours.open();
        assert_eq!(ours.ask("update t set a=a+1; select 7;"), "7");
        assert_eq!(ours.ask(SUM), "100 100 300000");
        ours.close();
        ours.keep(mode);
        ours.open();
        assert_eq!(ours.ask(SUM), "100 100 300000");
        assert_eq!(ours.shell.end(), "", "{mode}");
        let mut none = Process::start(&path, kind, "0");
        for _ in 0..3 {
            none.open();
            assert!(!none.has_kept(), "{mode}");
            assert_eq!(none.ask(SUM), "100 100 300000");
            none.close();
        }
        assert_eq!(none.shell.end(), "", "{mode}");
    }
}

/// Writes a copy over a database, whose size is the same, and sets the time of its last change.
fn restore(path: &Path, copy: &[u8], truncates: bool) {
    let before = fs::metadata(path).unwrap();
    assert_eq!(before.len(), copy.len() as u64);
    let file = File::options().write(true).truncate(truncates).open(path).unwrap();
    file.write_all_at(copy, 0).unwrap();
    file.set_modified(before.modified().unwrap()).unwrap();
    drop(file);
    let after = fs::metadata(path).unwrap();
    assert_eq!((after.mtime(), after.mtime_nsec()), (before.mtime(), before.mtime_nsec()));
}

fn system(path: &Path, sql: &str) {
    assert_eq!(through_the_system(path, &format!(".timeout 10000\n{sql}")).1, "");
}

/// Ends a process in a transaction that has written pages already.
fn kill(path: &Path, parameters: &str) {
    let mut other = Shell::start(with_cache(path, parameters));
    let change = "pragma cache_size=2; begin immediate; update t set a=a+1, b=randomblob(3000);";
    assert_eq!(other.ask(&format!("{change} select 1;")), "1");
    other.child.kill().unwrap();
    other.child.wait().unwrap();
}

/// A change of a database by another process, which has an older copy of it.
type Change = fn(&Path, &[u8]);

const CHANGES: [(&str, Change); 10] = [
    ("commit", |path, _| system(path, "update t set a=a+1 where id%7=0")),
    ("checkpoint", |path, _| {
        system(path, "update t set a=a+1; pragma wal_checkpoint(truncate); update t set a=a+1;")
    }),
    ("commits, two", |path, _| {
        let mut other = Shell::start(with_system(path));
        let mut late = Shell::start(with_system(path));
        assert_eq!(other.ask("update t set a=a+1; select 1;"), "1");
        assert_eq!(late.ask(".timeout 9000\nupdate t set a=a+1 where id=3; select 1;"), "1");
        assert_eq!((other.end(), late.end()), Default::default());
    }),
    ("vacuum", |path, _| system(path, "delete from t where id%2=0; vacuum;")),
    ("page size", |path, _| {
        let mode = "pragma journal_mode=delete; pragma page_size=1024;";
        system(path, &format!("{mode} vacuum; update t set a=a+1;"));
    }),
    ("growth", |path, _| system(path, "insert into t select id+1000, 1, b from t")),
    ("restored copy", |path, copy| restore(path, copy, true)),
    ("restored copy, in place", |path, copy| restore(path, copy, false)),
    ("kill", |path, _| kill(path, "bifolio_exclusive=0")),
    ("rename over", |path, copy| {
        let other = path.with_extension("other");
        fs::write(&other, copy).unwrap();
        fs::rename(other, path).unwrap();
    }),
];

/// Moment of a change.
#[derive(Clone, Copy, Debug)]
enum When {
    /// Between a close and the next open.
    Closed,
    /// After an open, before its first transaction.
    Opened,
    /// Between two transactions, before a close.
    Used,
}

fn check(mode: &str, kind: &str, when: When) {
    let directory = tempfile::tempdir().unwrap();
    if !has_sqlite() || !can_keep(directory.path()) {
        return;
    }
    for (number, (name, change)) in CHANGES.into_iter().enumerate() {
        if (name, mode) == ("page size", "wal") && matches!(when, When::Used) {
            // A log is left only by the last connection.
            continue;
        }
        let path = directory.path().join(format!("{number}.db"));
        make(&path, mode);
        let copy = fs::read(&path).unwrap();
        system(&path, "update t set a=a+1, b=randomblob(3000)");
        let what = format!("{name}, {mode}, {kind}, {when:?}");
        let mut ours = Process::start(&path, kind, "3");
        ours.keep(&what);
        if !matches!(when, When::Closed) {
            ours.open();
            assert!(ours.has_pages(), "{what}");
        }
        if matches!(when, When::Used) {
            assert_eq!(ours.ask(SUM), "100 100 300000", "{what}");
        }
        // Below a connection that has read, these are damage.
        let replaces = name.contains("restored") || name.contains("rename");
        let renames = name.contains("rename");
        change(&path, &copy);
        if matches!(when, When::Used) {
            if !replaces {
                ours.ask(SUM);
            }
            ours.close();
        }
        // A connection keeps the file that it has opened.
        if renames && matches!(when, When::Opened) {
            ours.close();
        }
        if !matches!(when, When::Opened) || renames {
            ours.open();
        }
        let found = [ours.ask(SUM), ours.ask("pragma integrity_check;")];
        ours.close();
        let (expected, _) = through_the_system(&path, &format!("{SUM} pragma integrity_check;"));
        assert_eq!(found.join("\n"), expected.trim(), "{what}");
        thread::sleep(TICK);
        ours.keep(&what);
        assert_eq!(ours.shell.end(), "", "{what}");
    }
}

#[test]
fn a_database_that_changed_while_it_was_closed_is_read_again() {
    modes_and_kinds().for_each(|(mode, kind)| check(mode, kind, When::Closed));
}

#[test]
fn a_database_that_changes_before_its_first_transaction_is_read_again() {
    modes_and_kinds().for_each(|(mode, kind)| check(mode, kind, When::Opened));
}

#[test]
fn a_database_that_changed_before_its_close_is_read_again() {
    MODES.into_iter().for_each(|mode| check(mode, "bifolio_exclusive=0", When::Used));
}
