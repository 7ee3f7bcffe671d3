/* Admission: two jobs of a key with a limit of 1, workers that may die in a run, a false suspicion, late settles.

   Each statement of jsworker/ownership/transitions/admission.py is a step, or two where others may come between what
   it counted and its commit. The first statement locks the key's row, the commit gives the lock back. A flag takes a
   protection away. */

#ifndef K
#define K 1            /* deaths, false suspicions and rows that somebody has locked, in all */
#endif

mtype = { QUEUED, HELD, RUNNING, DONE };

mtype job[2] = QUEUED;
byte token[2], ended[2], faults, lock;      /* who holds the lock, plus 1 */
bool message[2] = true, dead[2];
byte taken;                                 /* with COUNTER: slots, as a column says */

#define RUNS ((job[0] == RUNNING) + (job[1] == RUNNING))
#ifdef COUNTER
#define SLOTS taken
#else
#define SLOTS RUNS
#endif

#ifdef NO_LOCK
#define LOCK skip
#else
#define LOCK atomic { lock == 0 -> lock = _pid + 1 }
#endif
#define UNLOCK lock = (lock == _pid + 1 -> 0 : lock)
#ifdef NO_WAKE_LOCK
#define WAKE_LOCK skip
#else
#define WAKE_LOCK LOCK
#endif

#define MINE (job[id] == RUNNING && token[id] == mine)
#define WAITS(which) (job[which] == QUEUED || job[which] == HELD)

inline begins(which) {
	job[which] = RUNNING; token[which]++; mine = token[which]; dead[which] = false; taken++; UNLOCK;
	assert(RUNS <= 1)                           /* A1, at the commit */
}

active [2] proctype worker() {
	byte id, mine, seen;
	bool held;
idle:
end:
	if
	:: atomic { message[0] -> id = 0; message[0] = false }
	:: atomic { message[1] -> id = 1; message[1] = false }
	fi;
admits:                                             /* LOCK and ADMIT */
#ifdef COUNT_FIRST
	seen = SLOTS;
	LOCK;
#else
	LOCK;
	seen = SLOTS;
#endif
	if
	:: atomic { WAITS(id) && seen == 0 -> begins(id) }
	:: atomic {                                 /* one that is held goes before */
		job[id] == QUEUED && job[1 - id] == HELD && seen == 0 -> job[id] = HELD; id = 1 - id; begins(id) }
	:: atomic { job[id] == QUEUED && seen > 0 -> job[id] = HELD; UNLOCK; goto forget }
	:: atomic { !WAITS(id) || (job[id] == HELD && seen > 0) -> UNLOCK; goto forget }
	:: atomic {                                 /* somebody has locked the row: it is passed over */
		faults < K && WAITS(id) -> faults++; message[id] = (job[id] == QUEUED); UNLOCK; goto forget }
	fi;
	if
	:: true                                     /* it settles, perhaps late */
	:: atomic { faults < K && MINE -> faults++; dead[id] = true; goto forget }
	fi;
	atomic {                                    /* COMPLETE, under its fence */
		if
		:: MINE -> job[id] = DONE; ended[id]++; taken--; assert(ended[id] == 1)
		:: else ->
#ifdef COUNTER
			taken--                     /* a zombie gives back what it does not hold */
#else
			skip
#endif
		fi
	};
	/* It admits what is held, or, where others run that kind, it wakes it. */
	if
	:: atomic { id = 1 - id; mine = 0; seen = 0; goto admits }
	:: true
	fi;
	WAKE_LOCK;
	atomic { held = job[1 - id] == HELD; seen = SLOTS };
	if
	:: atomic { held && seen == 0 && job[1 - id] == HELD -> job[1 - id] = QUEUED; message[1 - id] = true; UNLOCK }
	:: atomic { faults < K && held -> faults++; UNLOCK }
	:: atomic { !(held && seen == 0 && job[1 - id] == HELD) -> UNLOCK }
	fi;
forget:
	atomic { id = 0; mine = 0; seen = 0; held = false };
	goto idle
}

/* RESET of a dead owner's run, or on a false suspicion; and the sweep that wakes what may begin. */
inline reset(which) {
	if
	:: job[which] = QUEUED; message[which] = true
	:: job[which] = DONE                        /* its last stall: it has failed, and nobody is there to wake others */
	fi;
	dead[which] = false; taken--
}

active proctype sweeper() {
end:
	do
	:: atomic { dead[0] && job[0] == RUNNING -> reset(0) }
	:: atomic { dead[1] && job[1] == RUNNING -> reset(1) }
	:: atomic { faults < K && job[0] == RUNNING && !dead[0] -> faults++; reset(0) }
	:: atomic { faults < K && job[1] == RUNNING && !dead[1] -> faults++; reset(1) }
#ifndef NO_SWEEP
	:: atomic { job[0] == HELD && SLOTS == 0 && lock == 0 -> job[0] = QUEUED; message[0] = true }
	:: atomic { job[1] == HELD && SLOTS == 0 && lock == 0 -> job[1] = QUEUED; message[1] = true }
#endif
	od
}

#define FINAL (job[0] == DONE && job[1] == DONE)
