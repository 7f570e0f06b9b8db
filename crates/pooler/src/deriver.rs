// SPDX-License-Identifier: Apache-2.0
//! PBKDF2 on threads of its own: one password may cost milliseconds, or seconds if a peer names millions of rounds, and a worker serves
//! many clients meanwhile.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};

use underpass_auth::{Derivation, ScramKeys};

use crate::shared::lock;

type Asker = Box<dyn FnOnce(ScramKeys) + Send>;

/// The threads. First asked, first served; each login has at most one question open.
pub(crate) struct Deriver {
    questions: Mutex<Sender<(Derivation, Asker)>>,
}

impl Deriver {
    pub fn start(threads: u16) -> std::io::Result<Self> {
        let (questions, incoming) = channel();
        let incoming = Arc::new(Mutex::new(incoming));
        for number in 0..threads {
            let incoming = incoming.clone();
            std::thread::Builder::new().name(format!("pbkdf2-{number}")).spawn(move || serve(&incoming))?;
        }
        Ok(Self { questions: Mutex::new(questions) })
    }

    /// Derives; `then` runs on a thread of this and must only pass the keys on.
    pub fn run(&self, derivation: Derivation, then: impl FnOnce(ScramKeys) + Send + 'static) {
        // The threads live as long as this does: their end of the channel is open.
        let _ = lock(&self.questions).send((derivation, Box::new(then)));
    }
}

fn serve(incoming: &Mutex<Receiver<(Derivation, Asker)>>) {
    loop {
        let question = lock(incoming).recv();
        let Ok((derivation, then)) = question else { return };
        then(derivation.run());
    }
}
