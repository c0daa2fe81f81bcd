//! The file of the log, and the earlier ones: `nat.log`, `nat.log.1` and so on, the oldest with the highest number.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead as _, BufReader, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use crate::nat_log::{LogRecord, NatLogSettings};

/// The file that is written.
#[derive(Debug)]
pub struct LogFile {
    settings: NatLogSettings,
}

impl LogFile {
    pub fn new(settings: NatLogSettings) -> Self {
        Self { settings }
    }

    /// Appends the lines as a whole, and waits until they are on the disk. It is opened again each time, so that a file that someone
    /// has moved away is made again.
    pub fn append(&self, lines: &[LogRecord]) -> io::Result<()> {
        write(&self.settings.path, lines)
    }

    pub fn is_there(&self) -> bool {
        self.settings.path.exists()
    }

    pub fn is_full(&self) -> io::Result<bool> {
        Ok(fs::metadata(&self.settings.path)?.len() >= self.settings.size)
    }

    /// Begins another file with these lines.
    pub fn begin_another(&self, lines: &[LogRecord]) -> io::Result<()> {
        let path = &self.settings.path;
        let next = numbered(path, 0);
        remove(&next)?;
        write(&next, lines)?;
        remove(&numbered(path, self.settings.kept))?;
        for number in (1..self.settings.kept).rev() {
            rename(&numbered(path, number), &numbered(path, number + 1))?;
        }
        if self.settings.kept > 0 {
            rename(path, &numbered(path, 1))?;
        }
        fs::rename(&next, path)
    }
}

fn write(path: &Path, lines: &[LogRecord]) -> io::Result<()> {
    let mut text = Vec::new();
    for line in lines {
        serde_json::to_writer(&mut text, line)?;
        text.push(b'\n');
    }
    // It tells which pods talk to the world.
    let mut file = OpenOptions::new().append(true).create(true).mode(0o640).open(path)?;
    file.write_all(&text)?;
    file.sync_data()
}

fn numbered(path: &Path, number: u32) -> PathBuf {
    let mut name: OsString = path.as_os_str().to_owned();
    name.push(format!(".{number}"));
    name.into()
}

fn remove(path: &Path) -> io::Result<()> {
    absent_is_fine(fs::remove_file(path))
}

fn rename(from: &Path, to: &Path) -> io::Result<()> {
    absent_is_fine(fs::rename(from, to))
}

fn absent_is_fine(done: io::Result<()>) -> io::Result<()> {
    match done {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        done => done,
    }
}

/// Calls back with each line of the log at `path`, the oldest file first. A line that is no record is counted: a write may have been
/// cut off. Returns their number.
pub fn read(path: &Path, mut visit: impl FnMut(LogRecord)) -> io::Result<u64> {
    let mut files: Vec<PathBuf> = (1..).map(|number| numbered(path, number)).take_while(|path| path.exists()).collect();
    files.reverse();
    files.push(path.to_owned());
    let mut unread = 0;
    for file in files {
        for line in BufReader::new(File::open(&file)?).split(b'\n') {
            match serde_json::from_slice(&line?) {
                Ok(record) => visit(record),
                Err(_) => unread += 1,
            }
        }
    }
    Ok(unread)
}
