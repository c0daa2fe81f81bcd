//! The guest's line to the host. Several threads write to it; each piece stays whole.

use std::fs::File;
use std::io::Write as _;
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, Result};

pub(super) struct SerialLine {
    file: Mutex<File>,
}

impl SerialLine {
    pub(super) fn new(file: File) -> Self {
        Self { file: Mutex::new(file) }
    }

    /// A line that `watch` reads.
    pub(super) fn tell(&self, text: &str) -> Result<()> {
        self.show(&[], text)
    }

    /// Likewise, with lines for people before it.
    pub(super) fn show(&self, lines: &[&str], text: &str) -> Result<()> {
        let mut piece = String::new();
        for line in lines {
            piece.push_str(line);
            piece.push('\n');
        }
        piece.push_str(&format!("guest: {text}\n"));
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        file.write_all(piece.as_bytes()).context("write to the serial line")
    }

    /// Returns when everything is on the line.
    pub(super) fn drain(&self) -> Result<()> {
        let file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        nix::sys::termios::tcdrain(&*file).context("finish writing")
    }
}
