"""Words and sentences of the generated site in `seo_site_planted.py`."""

# ruff: noqa: E501

from __future__ import annotations

TOPICS = {
    "coffee": ("burr grinder|espresso machine|moka pot|french press|milk frother", "a stiff brush|a paper filter",
               "citric acid|coffee oil", "the kitchen counter|the café"),
    "bicycles": ("bicycle chain|disc brake|saddle bag|rear derailleur|floor pump", "a torque wrench|a chain whip",
                 "bike grease|degreaser", "the bike shed|the workshop stand"),
    "beekeeping": ("bee smoker|hive frame|honey extractor|queen cage|bee veil", "a hive tool|a bee brush",
                   "beeswax|sugar syrup", "the apiary|the orchard edge"),
    "baking": ("sourdough starter|proofing basket|dutch oven|stand mixer|pizza stone", "a dough scraper|a lame",
               "rye flour|rice flour", "the bread drawer|the bakery"),
    "sailing": ("mainsail|anchor chain|bilge pump|mooring line|life raft", "a winch handle|a sail needle",
                "marine varnish|antifouling paint", "the marina|the cockpit locker"),
    "photography": ("telephoto lens|camera tripod|film scanner|flash gun|darkroom enlarger", "a blower|a lens pen",
                    "silica gel|developer fluid", "the studio|the camera cabinet"),
    "gardening": ("compost bin|hedge trimmer|rain barrel|pruning saw|seed tray", "a hand fork|secateurs",
                  "leaf mould|bone meal", "the greenhouse|the allotment"),
    "astronomy": ("reflector telescope|star chart|eyepiece set|equatorial mount|solar filter", "an allen key|a laser collimator",
                  "isopropyl alcohol|optical cleaning fluid", "the observatory|the dark hill site"),
}  # fmt: skip

# Titles of a page, titles of another page about the same, the query, then facts in two wordings.
ASPECTS = {
    "clean": (
        "Cleaning a {t}", "How to get a {t} spotless", "how do i clean my {t}",
        "Begin by wiping dust and residue off the {t} with {tool}.|Loose dirt on the {t} comes off first; {tool} does that job well.",
        "Soak the removable parts of the {t} in warm water for {n} minutes.|Detachable pieces of the {t} need a warm bath lasting {n} minutes.",
        "Stubborn stains on a {t} give way to a little {stuff}.|Use a small amount of {stuff} when marks on the {t} refuse to disappear.",
        "Never put the {t} into a dishwasher, because the heat bends it.|A dishwasher is too hot and would warp the {t}, so keep it out.",
        "Let everything dry completely before you assemble the {t} again.|Reassembling the {t} has to wait until no part is wet any more.",
        "A thorough wash of the {t} every {n} weeks is enough in normal use.|With ordinary use the {t} wants a deep clean once in {n} weeks.",
    ),
    "buy": (
        "Which {t} to buy", "{T} buying guide", "best {t} to buy",
        "A decent {t} costs about {n} euros; cheaper ones rarely last.|Expect to pay around {n} euros for a good {t}, since bargains break early.",
        "Check the weight of a {t} in the shop and whether it feels solid.|Hold the {t} in your hands at the store: it should be heavy and sturdy.",
        "Look for a maker that sells spare parts for its {t} for ten years.|Choose a brand which still supplies replacement pieces of the {t} a decade later.",
        "Second hand, a {t} is a bargain if nothing is cracked or rusty.|Used offers of a {t} are worth it as long as there is neither rust nor a crack.",
        "Models of the {t} with plastic gears should stay on the shelf.|Leave any {t} whose gears are plastic where it is.",
        "Reviews that compare {n} kinds of {t} side by side are the most useful.|The most helpful tests put {n} different versions of the {t} next to each other.",
    ),
    "store": (
        "Storing a {t} over winter", "Where a {t} spends the cold months", "how to store {t} in winter",
        "Keep the {t} in {place}, where the temperature hardly changes.|{Place} suits the {t}, because it stays about equally warm there.",
        "Damp air ruins a {t}, so add a bag that absorbs moisture.|Moisture is bad for the {t}; put a sachet that draws water next to it.",
        "Hang the {t} up instead of laying other things on top of it.|Nothing heavy should rest upon the {t}, which is better suspended from a hook.",
        "Wrap the {t} in an old cotton sheet, never in plastic foil.|Cover the {t} with worn cotton cloth; plastic film would trap sweat.",
        "Write the date on a label, then you know how long the {t} was away.|A tag with the day tells you later since when the {t} was packed.",
        "Look at the {t} every {n} weeks for mice, mould and moths.|Mould, rodents and moths can reach the {t}, so inspect it each {n} weeks.",
    ),
    "repair": (
        "Repairing a broken {t}", "What to do when the {t} stops working", "fix a broken {t}",
        "Most faults of a {t} come from one worn seal that costs {n} cents.|Usually a single perished gasket worth {n} cents is why the {t} fails.",
        "Take photographs while you dismantle the {t}, screw by screw.|Document each screw with a picture as you take the {t} apart.",
        "You need {tool} and patience to open the housing of the {t}.|Opening up the {t} takes a calm hand along with {tool}.",
        "A squeaking {t} is dry inside and wants a drop of {stuff}.|If the {t} squeals, apply one drop of {stuff} to the dry bearing within.",
        "Cracks in the body of a {t} cannot be glued for long.|Glue will not hold for any length of time on a split {t} casing.",
        "If the repair of the {t} costs over half of a new one, recycle it.|Scrap the {t} once fixing it is dearer than fifty percent of its replacement.",
    ),
    "history": (
        "The history of the {t}", "How the {t} was invented", "who invented the {t}",
        "The first {t} was built in 18{n} by a village blacksmith.|A rural smith made the earliest known {t} in the year 18{n}.",
        "Soldiers carried the {t} home and made it popular in towns.|It was returning troops who brought the {t} into fashion in the cities.",
        "A patent for an improved {t} was granted to two sisters from Lyon.|Two sisters of Lyon later received the patent on a better {t}.",
        "Between the wars factories turned out {n} thousand {t} models a year.|Industrial output reached {n} thousand units of the {t} per year in the interwar period.",
        "Museums show the {t} beside posters of the great exhibitions.|You find the {t} in museums today, next to placards of world fairs.",
        "The word {t} first appears in a merchant's letter.|Linguists trace the name {t} to correspondence of a trader.",
    ),
    "safety": (
        "Using a {t} safely", "Avoiding accidents with a {t}", "is a {t} dangerous",
        "Wear goggles when the {t} is under load, as splinters fly.|Eye protection is a must around a loaded {t}, because chips shoot out.",
        "Children under {n} years should not touch the {t} alone.|Do not leave anyone younger than {n} unsupervised with the {t}.",
        "Keep your fingers away from the moving part of the {t}.|Hands belong nowhere near whatever rotates or slides on the {t}.",
        "Disconnect or secure the {t} before you reach inside.|Before reaching into the {t}, make sure it is fixed or unplugged.",
        "Fumes of {stuff} are harmful, so open a window near the {t}.|Ventilate the room with the {t}, since vapour from {stuff} is unhealthy.",
        "Most injuries with a {t} happen in the last minutes of a long day.|Tired people get hurt by the {t}, typically just before they stop for the evening.",
    ),
    "begin": (
        "First steps with a {t}", "A {t} for absolute beginners", "learn to use a {t}",
        "Read the manual of the {t} twice; the second time with the thing in front of you.|Go through the {t} instructions two times, once of them with the device on the table.",
        "Practise the basic motion with the {t} for {n} minutes a day.|Daily training of {n} minutes makes the main movement of the {t} familiar.",
        "Your first attempts with the {t} will look clumsy, and that is fine.|It is normal that early tries with a {t} seem awkward.",
        "Ask an experienced neighbour to watch how you hold the {t}.|Someone nearby who knows the {t} can correct the way you grip it.",
        "A small notebook of mistakes with the {t} teaches more than any video.|Films help less than jotting down what went wrong with your {t}.",
        "After {n} weeks the {t} no longer needs your full attention.|You handle the {t} without thinking once {n} weeks have passed.",
    ),
}  # fmt: skip

OFF_TOPIC = {
    "Fast payday loans with no credit check": "Get cash in your bank account within ten minutes, even with bad credit. Our lenders approve payday loans around the clock. Interest is calculated weekly and the repayment is taken from your next salary. Apply online with your passport and a bank statement.",
    "Win big at the best online casino": "Claim a bonus of two hundred percent on your first deposit and play roulette, blackjack and a thousand slot machines. Jackpots are paid out the same day. Our casino holds a licence from an island and accepts gamblers from most countries.",
    "Free spins without deposit at new casinos": "These gambling sites give free spins on slot machines to new players. Wagering rules apply to every casino bonus, so read how often you must bet the sum. Poker and roulette are excluded from the free spins. Jackpots may take days to arrive.",
    "Pop star splits from actor after red carpet row": "The singer and the film actor have ended their engagement, friends told a celebrity magazine. Photographers saw the pair arguing at the premiere. Her new album is out next month, and fans speculate on social media which song is about him.",
    "Final score: United lose the derby after penalties": "The striker missed twice from the spot and the goalkeeper was sent off in a football derby with three red cards. The league table now shows the club in ninth position. The coach blamed the referee and hopes that the midfielder returns for the cup match.",
    "Should you put your savings into cryptocurrency": "Bitcoin fell by a fifth and altcoins lost more. Traders on the blockchain exchange borrow money to bet on tokens. Analysts expect the central bank to raise interest, which makes stablecoins risky. Taxes are due on every profitable coin that you sell.",
}  # fmt: skip

USUAL = {
    "contact": ("Contact", "Write to us by post or telephone. We answer letters within a week. Our office is open from nine to five. Journalists find the address of our press office below."),
    "privacy": ("Privacy policy", "We process personal data under the law. Cookies store your session. You may request deletion of your data at any time. The controller is named in the imprint, and logs are deleted after seven days."),
    "about": ("About us", "We are eleven editors who write for people with hobbies. The magazine began as a letter to friends. Nobody pays us for a review, and corrections are printed on the first page."),
}  # fmt: skip

NAVIGATION = "Home Coffee Bicycles Beekeeping Baking Sailing Photography Gardening Astronomy Subscribe Log in"
DELIVERY = (
    "You can order this issue with the article on the {t} as a print until Friday. Orders above forty euros are delivered "
    "free of charge within three working days, and returns are possible for thirty days if the wrapping is intact. Gift "
    "wrapping for the {t} edition costs extra. Our customer service helps with every question about payment, delivery "
    "and returns from Monday to Saturday."
)
NEWSLETTER = (
    "Subscribe to our letter about {topic} and receive one long read each Sunday. Eleven thousand readers already do. You "
    "can leave with one click, and we never sell addresses."
)
FOOTER = "Hobby Quarterly is printed on recycled paper. All rights reserved. Imprint, privacy, contact."
OTHER_FOOTER = (
    "Archive copy. This version of the text was made for printing and may lack pictures, tables and comments."
)

INTROS = {
    "coffee": "A good cup begins with freshly roasted beans.|Baristas talk about crema, extraction and water hardness.|The aroma of an espresso fades within minutes.|Water just below boiling brings out the taste of the beans.",
    "bicycles": "Cyclists feel every fault of their bike on a long climb.|A ride in the rain is hard on wheels and gears.|Between two tours a bike deserves an hour of attention.|Commuters pedal through salt and mud all winter.",
    "beekeeping": "A colony has up to fifty thousand bees in June.|Beekeepers harvest honey when the combs are capped.|The queen lays eggs from early spring on.|Varroa mites are the worry of every beekeeper.",
    "baking": "A crisp crust and an open crumb are the pride of a baker.|Dough needs time, warmth and flour with enough gluten.|The smell of fresh bread fills the whole house.|A loaf rises in the oven during the first ten minutes.",
    "sailing": "Skippers check the weather before they leave the harbour.|Salt water and sun wear out everything on a yacht.|Under sail the boat heels and the crew moves to windward.|A night at anchor is quiet if the tackle holds.",
    "photography": "Light, aperture and exposure time make a picture.|Photographers carry more equipment than they need.|Sharp pictures begin with a steady camera.|Film or sensor, dust is the enemy of every image.",
    "gardening": "Gardeners know that the soil decides about the harvest.|Vegetables want sun, water and few weeds.|After the last frost the beds are dug and sown.|Roses and apple trees are pruned in February.",
    "astronomy": "On a moonless night the Milky Way is visible.|Stargazers travel far for a dark sky.|Saturn's rings show in even a small instrument.|Galaxies look like faint clouds of light to the eye.",
}  # fmt: skip
