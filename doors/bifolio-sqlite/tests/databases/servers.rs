//! Servers of several processes, and other programs beside them, on one database: the real ones,
//! from package registries. What runs in each process is in tests/servers.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;

use bifolio_testing::attempt;

use crate::clients::{able_python, better_sqlite3, install};
use crate::others::{folder, succeed};
use crate::shell::{extension, has_sqlite};

const PACKAGES: [&str; 3] = ["django", "gunicorn", "celery"];
const LITESTREAM: &str = "github.com/benbjohnson/litestream/cmd/litestream@v0.3.13";

fn script(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/servers").join(name)
}

/// Returns a Python that has the packages of the servers.
fn python_of_servers() -> Option<PathBuf> {
    static INSTALLING: Mutex<()> = Mutex::new(());
    let _one_at_a_time = INSTALLING.lock().unwrap();
    let folder = folder("servers");
    let installed = folder.join("bin/python");
    if !installed.exists() {
        let mut make = Command::new(able_python()?);
        attempt(make.args(["-m", "venv"]).arg(&folder), "django")?;
    }
    let mut pip = Command::new(&installed);
    pip.args(["-m", "pip", "install", "--quiet"]).args(PACKAGES);
    install(&folder, &mut pip, "django")?;
    Some(installed)
}

/// A server with one process and with four; `BIFOLIO_SERVER_SECONDS` and `BIFOLIO_SERVER_ROUNDS`
/// make its figures reliable.
#[test]
#[ignore = "installs the packages django and gunicorn"]
fn django_under_gunicorn_serves_with_several_processes() {
    let Some(python) = python_of_servers() else { return };
    let asked = |name, default: &str| std::env::var(name).unwrap_or(default.to_owned());
    let mut command = Command::new(python);
    command.arg(script("serve.py")).arg(extension());
    command.arg(asked("BIFOLIO_SERVER_SECONDS", "3")).arg(asked("BIFOLIO_SERVER_ROUNDS", "1"));
    println!("{}", succeed(&mut command));
}

/// Runs a program beside a server of two processes.
fn run_beside(kind: &str, program: Option<PathBuf>) {
    let Some(python) = python_of_servers() else { return };
    let mut command = Command::new(python);
    command.arg(script("beside.py")).arg(extension()).arg(kind).args(program);
    println!("{}", succeed(&mut command));
}

#[test]
#[ignore = "installs the packages django and gunicorn"]
fn the_shell_changes_the_database_of_a_running_server() {
    if has_sqlite() {
        run_beside("shell", None);
    }
}

#[test]
#[ignore = "installs the packages django and gunicorn"]
fn the_database_of_a_running_server_is_backed_up() {
    if has_sqlite() {
        run_beside("backup", None);
    }
}

#[test]
#[ignore = "installs the packages django, gunicorn and celery"]
fn celery_works_beside_a_running_server() {
    run_beside("celery", None);
}

#[test]
#[ignore = "builds the module github.com/benbjohnson/litestream"]
fn litestream_replicates_the_database_of_a_running_server() {
    let folder = folder("litestream");
    let mut go = Command::new("go");
    go.args(["install", LITESTREAM]).env("GOBIN", &folder).env("CGO_ENABLED", "1");
    if install(&folder, &mut go, "litestream").is_some() {
        run_beside("litestream", Some(folder.join("litestream")));
    }
}

#[test]
#[ignore = "installs the package better-sqlite3"]
fn a_cluster_of_node_serves_one_database() {
    let Some(modules) = better_sqlite3() else { return };
    let directory = tempfile::tempdir().unwrap();
    let mut node = Command::new("node");
    node.arg(script("cluster.js")).arg(extension()).arg(directory.path().join("x.db"));
    println!("{}", succeed(node.env("NODE_PATH", modules)));
}

/// Rails 8 and Solid Queue are not among Debian's packages: Active Record and puma are, and a
/// process that does jobs which the server has noted in the database.
#[test]
#[ignore = "needs the packages puma, ruby-activerecord and ruby-sqlite3"]
fn a_cluster_of_puma_serves_beside_processes_that_do_its_jobs() {
    let mut found = Command::new("ruby");
    found.args(["-e", "require 'active_record'; require 'sqlite3'; require 'puma'"]);
    if attempt(&mut found, "puma").is_none() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let mut ruby = Command::new("ruby");
    ruby.arg(script("puma.rb")).arg(extension()).arg(directory.path());
    println!("{}", succeed(&mut ruby));
}
